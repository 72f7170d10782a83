// The numbers of a drawn pattern, as exact integers: pairs and their pictures, one query's keys, FlexAttention's tiles.
"use strict";

(() => {
  const { ceilDiv, isNear, mod, nearOf, numKept } = explorer;
  const MOST_CELLS = 512; // of a picture, per side
  const MOST_BLOCKS = 8192; // of a block mask, per side: as `flexdilated show --blocks`
  const MOST_FOLLOWED = 1 << 22; // tokens that are looked at one by one

  const tokensPerCell = (numTokens, most = MOST_CELLS) => ceilDiv(numTokens, most);

  // -- pairs -------------------------------------------------------------------------------------------------------------------

  // The rule of pairs: whether a branch of a head joins a query and a key, not causal.
  const joins = ({ length, rate, offset, window, first }, query, key) => window ? Math.abs(query - key) < window
    : first ? Math.min(query, key) < first
    : Math.floor(query / length) === Math.floor(key / length) && (query % length) % rate === offset && (key % length) % rate === offset;

  // The branches that count for a pair. Segments leave out the pairs of the window and of the first tokens.
  function joining(branches, query, key, isCausal) {
    const found = isCausal && key > query ? [] : branches.filter((branch) => joins(branch, query, key));
    return found.some(isNear) ? found.filter(isNear) : found;
  }

  // A branch as a sum of lattices. A lattice: of each segment, the pairs of every rate-th token from `skipped` on, at least `apart` rows apart.
  function lattices(branch, { window, first }) {
    if (branch.first) return [{ sign: 1, skipped: 0, apart: 0 }, { sign: -1, skipped: first, apart: 0 }];
    if (branch.window) return [{ sign: 1, skipped: first, apart: 0 }, { sign: -1, skipped: first, apart: window }];
    return [{ sign: 1, skipped: first, apart: window ? Math.floor((window - 1) / branch.rate) + 1 : 0 }];
  }

  // Pairs of a lattice among the tokens of [begin, end). BigInt: they grow with the square of the segment.
  function pairsWithin({ length, rate, offset }, { sign, skipped, apart }, begin, end, isCausal) {
    const from = Math.max(begin, skipped), first = Math.floor(from / length), last = Math.floor((end - 1) / length);
    const pairs = (low, high) => {
      const kept = BigInt(numKept(high, rate, offset) - numKept(low, rate, offset)), far = kept > apart ? kept - BigInt(apart) : 0n;
      return isCausal ? (far * (far + 1n)) / 2n : apart ? far * (far + 1n) : kept * kept;
    };
    if (from >= end) return 0n;
    if (first === last) return BigInt(sign) * pairs(from - first * length, end - first * length);
    return BigInt(sign) * (pairs(from - first * length, length) + BigInt(last - first - 1) * pairs(0, length) + pairs(0, end - last * length));
  }

  // (query, key) pairs that one head of a branch scores.
  const pairsOfBranch = (branch, near, numTokens, isCausal) => lattices(branch, near)
    .reduce((sum, lattice) => sum + pairsWithin(branch, lattice, 0, numTokens, isCausal), 0n);

  // Over all key/value heads, a pair that m branches join counted m times: per branch, in all, and those of dense attention.
  function countPairs(state, numTokens = state.seq_len) {
    const near = nearOf(explorer.allBranchesOf(state)), n = BigInt(numTokens);
    const branches = explorer.allBranchesOf(state).map((branch) => [...explorer.offsetsOf(state, branch.index)].reduce((sum, [offset, heads]) =>
      sum + BigInt(heads) * pairsOfBranch({ ...branch, offset }, near, numTokens, state.is_causal), 0n));
    const dense = BigInt(state.num_kv_heads) * (state.is_causal ? (n * (n + 1n)) / 2n : n * n);
    return { branches, total: branches.reduce((sum, pairs) => sum + pairs, 0n), dense };
  }

  // (cells x cells): for each cell of c x c pairs, the sum over them of how many branches join the pair. A cell is a pair when
  // c is 1, and the sum is its multiplicity.
  function picture(branches, numTokens, isCausal, most = MOST_CELLS) {
    const c = tokensPerCell(numTokens, most), cells = ceilDiv(numTokens, c);
    const counts = new Float64Array(cells * cells);
    for (const branch of branches) {
      for (const lattice of lattices(branch, nearOf(branches))) addLattice(counts, cells, c, branch, lattice, numTokens, isCausal);
    }
    return { cells, tokensPerCell: c, counts };
  }

  // Two cells share at most one segment: that of the earlier one's last token.
  function addLattice(counts, cells, c, branch, lattice, numTokens, isCausal) {
    const { length } = branch, { sign, skipped, apart } = lattice;
    const edge = (i) => Math.min(i * c, numTokens), segmentOf = (token) => Math.floor(token / length);
    const rows = (segment, begin, end) => [Math.max(begin, skipped), Math.max(end, skipped)]
      .map((token) => numKept(Math.min(Math.max(token - segment * length, 0), length), branch.rate, branch.offset));
    const first = [], last = [], rowsFirst = [], rowsLast = []; // of each cell: the segments of its first and its last token, and the rows there
    for (let i = 0; i < cells; i++) {
      counts[i * cells + i] += Number(pairsWithin(branch, lattice, edge(i), edge(i + 1), isCausal));
      first.push(segmentOf(edge(i)));
      last.push(segmentOf(edge(i + 1) - 1));
      rowsFirst.push(rows(first[i], edge(i), edge(i + 1)));
      rowsLast.push(rows(last[i], edge(i), edge(i + 1)));
      for (let j = i - 1; j >= 0 && last[j] === first[i]; j--) {
        const pairs = sign * pairsApart(apart, rowsFirst[i], rowsLast[j]);
        counts[i * cells + j] += pairs;
        if (!isCausal) counts[j * cells + i] += pairs;
      }
    }
  }

  // How many pairs of queries of [begin, end) and earlier keys of [first, stop) are at least `apart` rows apart.
  function pairsApart(apart, [begin, end], [first, stop]) {
    const rows = end - begin, columns = stop - first, low = Math.min(begin - apart + 1 - first, columns); // keys of the first query; of each other one more
    const a = Math.max(low, 0), b = Math.min(Math.max(low + rows, 0), columns);
    return (b * (b - 1) - a * (a - 1)) / 2 + columns * Math.max(low + rows - columns, 0);
  }

  // -- one query ---------------------------------------------------------------------------------------------------------------

  // The keys of a query. Per branch: the visible parts of its run, each `rows` tokens from `first` on, every rate-th. Then of all branches.
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
      const keeps = joins(branch, query, query), apart = lattices(branch, near)[0].apart * rate;
      const low = start + offset + numKept(near.first - start, rate, offset) * rate; // its first key
      if (query < near.first) return run(start, end, keeps, [low, low]);
      if (!apart) return run(start, end, keeps, [low, Math.min(end, limit)]);
      return run(start, end, keeps, [low, query - apart + 1], ...(isCausal ? [] : [[query + apart, end]]));
    });
    const seen = runs.flatMap(({ parts }) => parts).filter(({ rows }) => rows).map((part) => ({ ...part, end: part.first + (part.rows - 1) * part.rate + 1 }));
    return {
      runs,
      keys: countUnion(seen),
      joins: seen.reduce((sum, { rows }) => sum + rows, 0),
      farthest: seen.reduce((most, { first, end }) => Math.max(most, query - first, end - 1 - query), 0),
    };
  }

  // The number of different tokens in all parts. Between two ends of parts, tokens repeat after one period of the rates. null: a period is
  // too long to look at.
  function countUnion(parts) {
    const edges = [...new Set(parts.flatMap(({ first, end }) => [first, end]))].sort((a, b) => a - b);
    let total = 0;
    for (let i = 0; i + 1 < edges.length; i++) {
      const begin = edges[i], size = edges[i + 1] - begin, here = parts.filter(({ first, end }) => first <= begin && begin < end);
      const period = lcm(here.map(({ rate }) => rate), size);
      if (period > MOST_FOLLOWED) return null;
      for (let token = begin; token < begin + period; token++) {
        if (here.some(({ first, rate }) => (token - first) % rate === 0)) total += ceilDiv(size - (token - begin), period);
      }
    }
    return total;
  }

  // The least common multiple, or `most` where it is more.
  const gcd = (a, b) => (b ? gcd(b, a % b) : a);
  const lcm = (values, most) => values.reduce((product, value) => Math.min(product * (value / gcd(value, product)), most), 1);

  // -- tiles -------------------------------------------------------------------------------------------------------------------

  // Per class of equal heads: tiles that FlexAttention visits in the raw and in the packed layout; a picture for the selected head.
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
      pairs: branches.reduce((sum, b) => sum + pairsOfBranch(b, nearOf(branches), numTokens, isCausal), 0n),
    }));
    return { blocks, group, cells: ceilDiv(blocks, group), tiles: blocks * blocks, heads: found };
  }

  function rawTiles(branches, numTokens, size, isCausal, blocks, group) {
    const cells = group ? ceilDiv(blocks, group) : 0;
    const visitedIn = new Float64Array(cells * cells), fullIn = new Float64Array(cells * cells);
    const completing = branches.filter(completes(branches, size) ? () => true : isNear); // branches can fill a tile together only where these branches join pairs
    let visited = 0, full = 0;
    for (let row = 0; row < blocks; row++) {
      const at = group ? Math.floor(row / group) * cells : 0;
      const [low, high] = fullColumns(branches, row, numTokens, size, isCausal);
      for (const [first, last] of columnRuns(branches, row, numTokens, size, isCausal)) {
        visited += last - first + 1;
        addRun(visitedIn, at, first, last, group);
        const from = Math.max(first, low), to = Math.min(last, high);
        full += Math.max(0, to - from + 1);
        addRun(fullIn, at, from, to, group);
      }
      for (const [first, last] of columnRuns(completing, row, numTokens, size, isCausal)) {
        for (let column = first; column <= last; column++) {
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
    if (!group || first > last) return;
    for (let cell = Math.floor(first / group); cell * group <= last; cell++) {
      cells[at + cell] += Math.min(last, (cell + 1) * group - 1) - Math.max(first, cell * group) + 1;
    }
  }

  // The column blocks that branches join with a row of blocks, as runs of [first, last], disjoint and ascending.
  function columnRuns(branches, row, numTokens, size, isCausal) {
    const found = [];
    for (const [first, last] of branches.flatMap((branch) => runsOf(branch, row, numTokens, size, isCausal)).sort((a, b) => a[0] - b[0])) {
      if (found.length && first <= found.at(-1)[1] + 1) found.at(-1)[1] = Math.max(found.at(-1)[1], last);
      else found.push([first, last]);
    }
    return found;
  }

  // The runs of one branch.
  function runsOf({ length, rate, offset, window, first }, row, numTokens, size, isCausal) {
    const begin = row * size, end = Math.min(begin + size, numTokens), limit = isCausal ? end : numTokens, found = [];
    const add = (low, high) => found.push([Math.floor(low / size), Math.floor(high / size)]);
    if (first) add(0, Math.min(limit, begin < first && !isCausal ? numTokens : first) - 1);
    if (window) add(Math.max(0, begin - window + 1), Math.min(end + window - 1, limit) - 1);
    if (first || window) return found;
    for (let start = Math.floor(begin / length) * length; start < end; start += length) {
      const stop = Math.min(start + length, numTokens), low = start + offset;
      const kept = (token) => low + (numKept(token - start, rate, offset) - 1) * rate; // the last one before a token
      const lastQuery = kept(Math.min(end, stop)), lastKey = isCausal ? lastQuery : kept(stop);
      if (lastQuery < Math.max(begin, low)) continue;
      if (rate <= size) add(low, lastKey);
      else for (let key = low; key <= lastKey; key += rate) add(key, key);
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

  // Whether segments may fill a tile together. Dilated ones join positions whose distance is a multiple of a rate: where the boundaries of
  // the rate 1 branches nest, they leave at least a row of a tile, which a few rates cannot fill.
  function completes(branches, size) {
    const segments = explorer.segmentsOf(branches), lengths = segments.filter(({ rate }) => rate === 1).map(({ length }) => length);
    const rates = [...new Set(segments.map(({ rate }) => rate))].filter((rate) => rate > 1);
    const prime = rates.filter((rate) => !rates.some((other) => other !== rate && rate % other === 0));
    const isNested = lengths.every((length) => Math.max(...lengths) % length === 0);
    return (prime.length > 0 && !isNested) || prime.reduce((sum, rate) => sum + ceilDiv(size, rate), 0) >= size;
  }

  // Whether all pairs of a tile are joined: corners first, since few tiles survive them.
  function isJoined(branches, x, y, size, numTokens, isCausal) {
    if (x + size > numTokens || y + size > numTokens || (isCausal && x < y + size - 1)) return false;
    const joined = (i, j) => branches.some((branch) => joins(branch, x + mod(i, size), y + mod(j, size)));
    if (![[-1, 0], [-2, 0], [-1, 1], [0, -1], [0, 0]].every(([i, j]) => joined(i, j))) return false;
    for (let i = 0; i < size; i++) for (let j = 0; j < size; j++) if (!joined(i, j)) return false;
    return true;
  }

  // Tiles of a mask over the kept rows of a branch, segment after segment.
  function packedTiles(branch, numTokens, size, isCausal) {
    const length = Math.min(branch.length, numTokens), rows = numKept(length, branch.rate, branch.offset), packed = { ...branch, length: rows, rate: 1, offset: 0 };
    const total = Math.floor(numTokens / length) * rows + numKept(numTokens % length, branch.rate, branch.offset);
    let visited = 0;
    for (let row = 0; row * size < total; row++) {
      for (const [first, last] of columnRuns([packed], row, total, size, isCausal)) visited += last - first + 1;
    }
    return visited;
  }

  Object.assign(explorer, { MOST_CELLS, MOST_FOLLOWED, countPairs, joining, lcm, picture, queryKeys, tiles, tokensPerCell });
})();
