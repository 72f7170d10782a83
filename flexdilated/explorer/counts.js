// What is drawn of a pattern, in exact integers: pictures of pairs, one query's keys, FlexAttention's tiles, reach over layers.
"use strict";

(() => {
  const { ceilDiv, mod, nearOf, numKept, rowsApart } = explorer;
  const MOST_CELLS = 512; // of a picture, per side
  const MOST_BLOCKS = 8192; // of a block mask, per side: as `flexdilated show --blocks`
  const MOST_REACHED = 4096; // tokens of which all pairs are followed through the layers
  const MOST_FOLLOWED = 1 << 22; // tokens of which one query is

  const tokensPerCell = (numTokens, most = MOST_CELLS) => ceilDiv(numTokens, most);

  // -- pairs -------------------------------------------------------------------------------------------------------------------

  // (cells x cells): for each cell of c x c pairs, the sum over them of how many branches join the pair. A cell is a pair when
  // c is 1, and the sum is its multiplicity.
  function picture(branches, numTokens, isCausal, most = MOST_CELLS) {
    const c = tokensPerCell(numTokens, most);
    const cells = ceilDiv(numTokens, c);
    const counts = new Float64Array(cells * cells);
    const near = nearOf(branches);
    if (near.window || near.first) addNear(counts, cells, c, near, numTokens, isCausal);
    for (const branch of explorer.segmentsOf(branches)) addBranch(counts, cells, c, branch, near, numTokens, isCausal);
    return { cells, tokensPerCell: c, counts };
  }

  // How many pairs of tokens of [begin, end) and [first, stop) have a key at most `most` tokens after the query.
  function pairsUpTo(most, begin, end, first, stop) {
    const rows = end - begin, columns = stop - first;
    const low = Math.min(Math.max(most + 1 + begin - first, -rows), columns); // keys of the first query; of each other one more
    const [a, b] = [low, low + rows].map((x) => Math.min(Math.max(x, 0), columns));
    return (b * (b - 1) - a * (a - 1)) / 2 + columns * Math.max(low + rows - columns, 0);
  }

  // Pairs of the window, and all pairs but those without a global token.
  function addNear(counts, cells, c, { window, first }, numTokens, isCausal) {
    const far = Math.ceil((window - 1) / c) + 1; // cells that a row of cells sees to a side, at most
    for (let i = 0; i < cells; i++) {
      const at = (k, from) => [Math.max(k * c, from), Math.max(Math.min((k + 1) * c, numTokens), from)];
      for (let j = 0; j < (isCausal ? i + 1 : cells); j++) {
        const all = [...at(i, 0), ...at(j, 0)], later = [...at(i, first), ...at(j, first)], most = isCausal ? 0 : numTokens;
        if (first) counts[i * cells + j] += pairsUpTo(most, ...all) - pairsUpTo(most, ...later);
        if (window && Math.abs(i - j) <= far) counts[i * cells + j] += pairsUpTo(isCausal ? 0 : window - 1, ...later) - pairsUpTo(-window, ...later);
      }
    }
  }

  function addBranch(counts, cells, c, branch, near, numTokens, isCausal) {
    const w = Math.min(branch.length, numTokens), apart = rowsApart(near, branch.rate);
    // `rows`: the range of a segment's rows in tokens [begin, end), without global tokens. `joined`: the pairs that are far enough apart.
    const rows = (segment, begin, end) => {
      const [skipped, from, to] = [near.first, begin, end].map((token) => numKept(Math.min(token - segment * w, w), branch.rate, branch.offset));
      return [Math.max(from, skipped), Math.max(from, skipped, to)];
    };
    const joined = (queries, keys) => pairsUpTo(-apart, ...queries, ...keys) +
      (isCausal ? 0 : (queries[1] - queries[0]) * (keys[1] - keys[0]) - pairsUpTo(Math.max(apart, 1) - 1, ...queries, ...keys));
    const square = (queries) => joined(queries, queries), whole = (segment) => square(rows(segment, segment * w, (segment + 1) * w));
    const begun = Math.floor(near.first / w); // the segment of the first token that is not global
    // Of each cell the segment of its first and of its last token, and the rows in either.
    const first = new Float64Array(cells), last = new Float64Array(cells), rowsFirst = [], rowsLast = [];
    for (let i = 0; i < cells; i++) {
      const begin = i * c, end = Math.min(begin + c, numTokens);
      const a = (first[i] = Math.floor(begin / w)), b = (last[i] = Math.floor((end - 1) / w));
      rowsFirst.push(rows(a, begin, Math.min(end, (a + 1) * w)));
      rowsLast.push(rows(b, Math.max(begin, b * w), end));
      counts[i * cells + i] += square(rowsFirst[i]) + (b > a ? square(rowsLast[i]) : 0);
      if (a < begun && begun < b) counts[i * cells + i] += whole(begun);
      const later = b - 1 - Math.max(a, begun);
      if (later > 0) counts[i * cells + i] += later * whole(b - 1);
    }
    // Two cells share at most the segment of the earlier one's last token. Row by row, as they lie in memory.
    for (let i = 0; i < cells; i++) {
      const row = i * cells;
      for (let j = i - 1; j >= 0 && last[j] === first[i]; j--) counts[row + j] += joined(rowsFirst[i], rowsLast[j]);
      for (let j = i + 1; !isCausal && j < cells && first[j] === last[i]; j++) counts[row + j] += joined(rowsLast[i], rowsFirst[j]);
    }
  }

  // One picture per key/value heads that are alike.
  function pictures(state, most) {
    return explorer.headClasses(state).map(({ heads, branches }) => ({
      heads, branches, ...picture(branches, state.seq_len, state.is_causal, most),
    }));
  }

  // Whether a pair is one of the window or the global tokens, and how often a pair counts.
  const isNear = ({ window, first }, query, key) => Math.abs(query - key) < window || Math.min(query, key) < first;

  function multiplicity(branches, query, key, isCausal) {
    if (isCausal && key > query) return 0;
    if (isNear(nearOf(branches), query, key)) return 1;
    return explorer.segmentsOf(branches).filter(({ length, rate, offset }) => {
      const start = Math.floor(query / length) * length;
      return Math.floor(key / length) * length === start && (query - start) % rate === offset && (key - start) % rate === offset;
    }).length;
  }

  // -- one query ---------------------------------------------------------------------------------------------------------------

  // The keys of a query: per branch the parts of a run that it sees, `rows` tokens from `first` on, every rate-th; and of all together.
  function queryKeys(state, branches) {
    const { query, seq_len: numTokens, is_causal: isCausal } = state;
    const near = nearOf(branches), limit = isCausal ? query + 1 : numTokens;
    const runs = branches.map((branch) => {
      const run = (start, end, keeps, ...spans) => {
        const parts = spans.map(([low, high]) => ({ first: low, rate: branch.rate, rows: keeps ? numKept(high - low, branch.rate, 0) : 0 }));
        return { ...branch, start, end, keeps, parts, rows: parts.reduce((sum, { rows }) => sum + rows, 0) };
      };
      if (branch.first) return run(0, Math.min(branch.first, numTokens), true, [0, query < branch.first ? limit : branch.first]);
      if (branch.window) {
        const [low, high] = [Math.max(near.first, query - branch.window + 1), Math.min(query + branch.window, limit)];
        return run(low, high, true, [low, query < near.first ? low : high]);
      }
      const { length, rate, offset } = branch, start = Math.floor(query / length) * length, end = Math.min(start + length, numTokens);
      const keeps = (query - start) % rate === offset, apart = rowsApart(near, rate) * rate;
      const low = start + offset + numKept(Math.min(near.first - start, length), rate, offset) * rate; // its first key
      if (!keeps || query < near.first) return run(start, end, keeps, [low, low]);
      if (!apart) return run(start, end, keeps, [low, Math.min(end, limit)]);
      return run(start, end, keeps, [low, query - apart + 1], ...(isCausal ? [] : [[query + apart, end]]));
    });
    const seen = runs.flatMap(({ parts }) => parts).filter(({ rows }) => rows);
    const union = seen.map(({ first, rate, rows }) => ({ first, rate, begin: first, end: first + (rows - 1) * rate + 1 }));
    return {
      runs,
      keys: explorer.countUnion(union),
      joins: seen.reduce((sum, { rows }) => sum + rows, 0),
      farthest: seen.reduce((most, { first, rate, rows }) => Math.max(most, query - first, first + (rows - 1) * rate - query), 0),
    };
  }

  // -- tiles -------------------------------------------------------------------------------------------------------------------

  // Per heads that are alike: tiles that FlexAttention visits in the raw layout and packed; a picture of them for the head looked at.
  function tiles(state) {
    const { seq_len: numTokens, block_size: size, is_causal: isCausal } = state;
    const blocks = ceilDiv(numTokens, size);
    if (blocks > MOST_BLOCKS) {
      return { why: `Tiles are counted up to ${MOST_BLOCKS.toLocaleString("en")} per side; here there are ` +
        `${blocks.toLocaleString("en")}. Choose larger tiles or fewer tokens.` };
    }
    const group = ceilDiv(blocks, MOST_CELLS);
    const found = explorer.headClasses(state).map(({ heads, branches }) => ({
      heads,
      ...rawTiles(branches, numTokens, size, isCausal, blocks, heads.includes(explorer.kvHead(state)) ? group : null),
      packed: branches.reduce((sum, branch) => sum + packedTiles(branch, numTokens, size, isCausal), 0),
      pairs: branches.reduce((sum, b) => sum + explorer.pairsOfBranch(b, b.offset, numTokens, isCausal, nearOf(branches)), 0n),
    }));
    return { blocks, group, cells: ceilDiv(blocks, group), tiles: blocks * blocks, heads: found };
  }

  function rawTiles(all, numTokens, size, isCausal, blocks, group) {
    const branches = distinct(all, numTokens);
    const cells = group ? ceilDiv(blocks, group) : 0;
    const visitedIn = new Float64Array(cells * cells), fullIn = new Float64Array(cells * cells);
    const mayComplete = completion(branches, size);
    let visited = 0, full = 0;
    for (let row = 0; row < blocks; row++) {
      const at = group ? Math.floor(row / group) * cells : 0;
      const [low, high] = fullColumns(branches, row, numTokens, size, isCausal);
      for (const [first, last] of union(branches.flatMap((branch) => columnRuns(branch, row, numTokens, size, isCausal)))) {
        visited += last - first + 1;
        addRun(visitedIn, at, first, last, group);
        const from = Math.max(first, low), to = Math.min(last, high);
        if (from <= to) {
          full += to - from + 1;
          addRun(fullIn, at, from, to, group);
        }
        // Where a window alone may leave too little for full tiles, they are among those that it joins in part.
        const [near, end] = mayComplete === "near" ? columnRuns(branches.find((b) => b.window), row, numTokens, size, isCausal)[0] : [first, last];
        for (let column = Math.max(first, near); mayComplete && column <= Math.min(last, end); column++) {
          if ((low <= column && column <= high) || !isJoined(branches, row * size, column * size, size, numTokens, isCausal)) continue;
          full++;
          addRun(fullIn, at, column, column, group);
        }
      }
    }
    return { partial: visited - full, full, visitedIn, fullIn };
  }

  // Add the blocks of a run to the cells, `group` blocks wide, of a row of cells; where there are any.
  function addRun(cells, at, first, last, group) {
    if (!group) return;
    for (let cell = Math.floor(first / group); cell * group <= last; cell++) {
      cells[at + cell] += Math.min(last, (cell + 1) * group - 1) - Math.max(first, cell * group) + 1;
    }
  }

  // Runs of blocks, disjoint and ascending.
  function union(runs) {
    const found = [];
    for (const [first, last] of runs.sort((a, b) => a[0] - b[0])) {
      if (found.length && first <= found.at(-1)[1] + 1) found.at(-1)[1] = Math.max(found.at(-1)[1], last);
      else found.push([first, last]);
    }
    return found;
  }

  // Branches that are the same are one to a mask.
  function distinct(branches, numTokens) {
    const found = new Map();
    for (const branch of branches) {
      const length = Math.min(branch.length, numTokens);
      found.set(`${length},${branch.rate},${branch.offset},${branch.window},${branch.first}`, { ...branch, length });
    }
    return [...found.values()];
  }

  // The column blocks that a branch joins with a row of blocks, as runs of [first, last].
  function columnRuns({ length, rate, offset, window, first }, row, numTokens, size, isCausal) {
    const begin = row * size, end = Math.min(begin + size, numTokens);
    if (first) return [[0, Math.floor((Math.min(isCausal ? end : numTokens, begin < first && !isCausal ? numTokens : first) - 1) / size)]];
    if (window) return [[Math.max(0, begin - window + 1), Math.min(end - 1 + (isCausal ? 0 : window - 1), numTokens - 1)].map((key) => Math.floor(key / size))];
    const found = [];
    for (let s = Math.floor(begin / length); s * length < end; s++) {
      const start = s * length, stop = Math.min(start + length, numTokens), lattice = start + offset;
      const firstKept = lattice + Math.max(0, ceilDiv(Math.max(begin, start) - lattice, rate)) * rate;
      const lastQuery = lattice + Math.floor((Math.min(end, stop) - 1 - lattice) / rate) * rate;
      if (firstKept >= Math.min(end, stop)) continue;
      const lastKey = isCausal ? lastQuery : lattice + Math.floor((stop - 1 - lattice) / rate) * rate;
      if (rate <= size) found.push([Math.floor(lattice / size), Math.floor(lastKey / size)]);
      else for (let key = lattice; key <= lastKey; key += rate) found.push([Math.floor(key / size), Math.floor(key / size)]);
    }
    return found;
  }

  // First and last column block that branches of rate 1 join in full with a row of blocks.
  function fullColumns(branches, row, numTokens, size, isCausal) {
    const begin = row * size, last = begin + size - 1;
    const near = branches.filter(({ rate, first }) => rate === 1 && !first);
    if (!near.length || last >= numTokens) return [1, 0];
    const down = Math.min(...near.map(({ length: w, window }) => (window ? Math.max(0, last + 1 - window) : Math.floor(last / w) * w)));
    const ends = near.map(({ length: w, window }) => (window ? begin + window : (Math.floor(begin / w) + 1) * w));
    const up = Math.min(numTokens, isCausal ? begin + 1 : Infinity, Math.max(...ends));
    return [ceilDiv(down, size), Math.floor(up / size) - 1];
  }

  // Whether a dilated branch may complete a tile. Dilated branches join positions whose distance is a multiple of a rate: where the
  // borders of the rate 1 branches nest, they leave at least a row of a tile, which a few rates cannot fill.
  function completion(branches, size) {
    if (nearOf(branches).first) return true; // global tokens may be a part of a tile
    const lengths = branches.filter(({ rate, window }) => rate === 1 && !window).map(({ length }) => length);
    const longest = Math.max(...lengths);
    const rates = [...new Set(branches.map(({ rate }) => rate))].filter((rate) => rate > 1);
    const prime = rates.filter((rate) => !rates.some((other) => other !== rate && rate % other === 0));
    const nested = lengths.every((w) => longest % w === 0);
    if (!prime.length) return false;
    if (!nested || prime.reduce((sum, rate) => sum + ceilDiv(size, rate), 0) >= size) return true;
    return branches.some(({ window }) => window) && "near";
  }

  // Whether all pairs of a tile are joined: corners first, since few tiles survive them.
  function isJoined(branches, x, y, size, numTokens, isCausal) {
    if (x + size > numTokens || y + size > numTokens) return false;
    const joined = (i, j) => multiplicity(branches, x + mod(i, size), y + mod(j, size), isCausal) > 0;
    if (![[-1, 0], [-2, 0], [-1, 1], [0, -1], [0, 0]].every(([i, j]) => joined(i, j))) return false;
    for (let i = 0; i < size; i++) for (let j = 0; j < size; j++) if (!joined(i, j)) return false;
    return true;
  }

  // Tiles of a mask over the kept rows of a branch, segment after segment.
  function packedTiles({ length, rate, offset, window, first: globals }, numTokens, size, isCausal) {
    if (window || globals) {
      let tiles = 0;
      for (let row = 0; row * size < numTokens; row++) {
        const [[first, last]] = columnRuns({ window, first: globals }, row, numTokens, size, isCausal);
        tiles += last - first + 1;
      }
      return tiles;
    }
    const w = Math.min(length, numTokens);
    const rows = numKept(w, rate, offset);
    if (!rows) return 0;
    const total = Math.floor(numTokens / w) * rows + numKept(numTokens % w, rate, offset);
    let visited = 0;
    for (let start = 0; start < total; start += size) {
      const end = Math.min(start + size, total);
      const last = isCausal ? end - 1 : Math.min(total, (Math.floor((end - 1) / rows) + 1) * rows) - 1;
      visited += Math.floor(last / size) - Math.floor((Math.floor(start / rows) * rows) / size) + 1;
    }
    return visited;
  }

  // -- layers ------------------------------------------------------------------------------------------------------------------

  // Tokens that attend to one another, all heads together: a list of ascending tokens per branch, offset and segment.
  function groups(state) {
    const numTokens = state.seq_len;
    const found = [];
    const seen = new Set();
    for (const { index, length, rate } of explorer.branchesOf(state)) {
      const w = Math.min(length, numTokens);
      const [first, end] = explorer.headRange(state, index);
      for (let head = first; head < end; head++) {
        const offset = explorer.offset(state, index, head);
        if (seen.has(`${w},${rate},${offset}`)) continue;
        seen.add(`${w},${rate},${offset}`);
        for (let start = 0; start + offset < numTokens; start += w) {
          if (offset < w) found.push({ first: start + offset, rate, end: Math.min(start + w, numTokens) });
        }
      }
    }
    return found;
  }

  // Who reaches whom after each layer: a token reaches itself (the residual connection) and, through a layer, what the tokens that
  // it attends to reach. One bit per pair, 32 to a word, a row of words per query.
  function reach(state) {
    const { seq_len: n, is_causal: isCausal, layers } = state;
    if (n > MOST_REACHED) return null;
    const words = (n + 31) >>> 5;
    const all = groups(state);
    let now = new Int32Array(n * words);
    for (let q = 0; q < n; q++) now[q * words + (q >>> 5)] = 1 << (q & 31);
    const every = isCausal ? (n * (n + 1)) / 2 : n * n;
    const pairs = [n];
    let shown = now, isFinal = false;
    while (pairs.length <= explorer.LIMITS.layers) {
      const next = now.slice();
      for (const group of all) joinGroup(next, now, group, words, isCausal);
      if (state.window > 1) joinWindow(next, now, words, state.window, isCausal);
      joinFirst(next, now, words, Math.min(state.global_tokens, n), isCausal);
      const count = countBits(next);
      const grown = count > pairs.at(-1);
      now = next;
      if (grown) pairs.push(count);
      if (pairs.length - 1 <= layers) shown = now;
      if ((isFinal = !grown)) break;
    }
    return { words, bits: shown, pairs, every, layersToAll: pairs.at(-1) === every ? pairs.length - 1 : null, isFinal };
  }

  // Each row takes in the rows of the window before it and, not causal, after it; every step takes in up to twice as many.
  function joinWindow(next, now, words, window, isCausal) {
    const before = now.slice(), after = isCausal ? before : now.slice(), size = Math.min(window, now.length / words);
    for (let taken = 1; taken < size; taken += Math.min(taken, size - taken)) {
      const shift = Math.min(taken, size - taken) * words;
      for (let i = now.length - 1; i >= shift; i--) before[i] |= before[i - shift];
      if (!isCausal) for (let i = 0; i + shift < now.length; i++) after[i] |= after[i + shift];
    }
    for (let i = 0; i < now.length; i++) next[i] |= before[i] | after[i];
  }

  // Each row takes in the rows of the global tokens; not causal, their rows take in all.
  function joinFirst(next, now, words, first, isCausal) {
    const union = new Int32Array(words), n = now.length / words;
    for (let q = 0; first && q < n; q++) {
      if (q < first) for (let i = 0; i < words; i++) union[i] |= now[q * words + i];
      if (isCausal) for (let i = 0; i < words; i++) next[q * words + i] |= union[i];
    }
    if (isCausal || !first) return;
    for (let q = first; q < n; q++) for (let i = 0; i < words; i++) next[q * words + i] |= union[i];
    for (let q = first; q < n; q++) for (let i = 0; i < words; i++) union[i] |= now[q * words + i];
    for (let q = 0; q < first; q++) for (let i = 0; i < words; i++) next[q * words + i] |= union[i];
  }

  function joinGroup(next, now, { first, rate, end }, words, isCausal) {
    const union = new Int32Array(words);
    if (!isCausal) {
      for (let q = first; q < end; q += rate) for (let i = 0, at = q * words; i < words; i++) union[i] |= now[at + i];
    }
    for (let q = first; q < end; q += rate) {
      const at = q * words;
      if (isCausal) for (let i = 0; i < words; i++) union[i] |= now[at + i];
      for (let i = 0; i < words; i++) next[at + i] |= union[i];
    }
  }

  function bitsOf(word) {
    word -= (word >>> 1) & 0x55555555;
    word = (word & 0x33333333) + ((word >>> 2) & 0x33333333);
    return (((word + (word >>> 4)) & 0x0f0f0f0f) * 0x01010101) >>> 24;
  }

  function countBits(bits) {
    let total = 0;
    for (let i = 0; i < bits.length; i++) total += bitsOf(bits[i]);
    return total;
  }

  // Per cell of c x c pairs how many are reached.
  function reachPicture({ bits, words }, numTokens, most = MOST_CELLS) {
    const c = tokensPerCell(numTokens, most);
    const cells = ceilDiv(numTokens, c);
    const counts = new Float64Array(cells * cells);
    for (let q = 0; q < numTokens; q++) {
      const row = Math.floor(q / c) * cells;
      for (let cell = 0, first = 0; cell < cells; cell++, first += c) {
        const end = Math.min(first + c, numTokens);
        for (let at = first; at < end; at = ((at >>> 5) + 1) << 5) {
          const word = bits[q * words + (at >>> 5)] >>> (at & 31), held = Math.min(32 - (at & 31), end - at);
          counts[row + cell] += bitsOf(held === 32 ? word : word & ((1 << held) - 1));
        }
      }
    }
    return { cells, tokensPerCell: c, counts };
  }

  // What one query reaches after each layer, and where: for sequences too long for all pairs. A group is reached as a whole, or up to
  // its last reached member when causal.
  function reachOf(state) {
    const { seq_len: n, query, is_causal: isCausal, layers } = state;
    if (n > MOST_FOLLOWED) return null;
    const all = groups(state);
    let now = new Uint8Array(n);
    now[query] = 1;
    const reached = [1];
    let shown = now, isFinal = false;
    while (reached.length <= explorer.LIMITS.layers) {
      const next = now.slice();
      for (const { first, rate, end } of all) {
        let last = -1;
        for (let q = first + Math.floor((end - 1 - first) / rate) * rate; q >= first; q -= rate) {
          if (now[q]) {
            last = q;
            break;
          }
        }
        if (last < 0) continue;
        for (let q = first, stop = isCausal ? last + 1 : end; q < stop; q += rate) next[q] = 1;
      }
      for (let q = n - 1, last = Infinity; state.window > 1 && q >= 0; q--) {
        if (now[q]) last = q;
        if (last - q < state.window) next[q] = 1;
      }
      for (let q = 0, last = -Infinity; state.window > 1 && !isCausal && q < n; q++) {
        if (now[q]) last = q;
        if (q - last < state.window) next[q] = 1;
      }
      next.fill(1, 0, Math.min(state.global_tokens, isCausal ? query + 1 : n));
      if (!isCausal && now.subarray(0, state.global_tokens).includes(1)) next.fill(1);
      let count = 0;
      for (let q = 0; q < n; q++) count += next[q];
      now = next;
      const grown = count > reached.at(-1);
      if (grown) reached.push(count);
      if (reached.length - 1 <= layers) shown = now;
      if ((isFinal = !grown)) break;
    }
    return { reached, every: isCausal ? query + 1 : n, shown, isFinal };
  }

  // Tokens that no head of any branch keeps: they neither attend nor are seen.
  function uncovered(state) {
    const n = state.seq_len;
    if (state.window !== null || state.global_tokens) return 0;
    if (n > MOST_FOLLOWED) return null;
    const kept = new Uint8Array(n);
    for (const { first, rate, end } of groups(state)) for (let q = first; q < end; q += rate) kept[q] = 1;
    let count = 0;
    for (let q = 0; q < n; q++) count += 1 - kept[q];
    return count;
  }

  Object.assign(explorer, {
    MOST_CELLS, MOST_REACHED, multiplicity, picture, pictures, queryKeys, reach, reachOf, reachPicture, tiles, tokensPerCell, uncovered,
  });
})();
