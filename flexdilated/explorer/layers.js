// What layers pass on, all heads together: the tokens that queries have seen after each layer, and the first boundary that stops information.
"use strict";

(() => {
  const { MOST_FOLLOWED, ceilDiv, mod } = explorer;
  const MOST_REACHED = 4096; // tokens of which all pairs are followed through the layers

  // Tokens that attend to one another: `first`, `first + rate`, ... below `end`. Queries are those below `reads`, keys those below `writes`.
  function groups(state) {
    const { seq_len: n, is_causal: isCausal } = state, first = Math.min(state.global_tokens, n), found = [];
    if (first) found.push({ first: 0, rate: 1, end: n, writes: first });
    if (first && !isCausal) found.push({ first: 0, rate: 1, end: n, reads: first });
    for (const { index, length, rate } of explorer.segmentsOf(explorer.allBranchesOf(state))) {
      for (const offset of explorer.offsetsOf(state, index).keys()) {
        for (let start = 0; start + offset < n; start += length) found.push({ first: start + offset, rate, end: Math.min(start + length, n) });
      }
    }
    return found;
  }

  // How many tokens the queries have seen after each layer, and which after the shown one: a query sees itself (the residual connection)
  // and, a layer later, the keys of what it has seen. A bit per token and query, 32 to a word, a row of words per token.
  function follow(state, queries) {
    const { seq_len: n, is_causal: isCausal, layers } = state, words = (queries.length + 31) >>> 5, all = groups(state);
    const every = queries.reduce((sum, query) => sum + (isCausal ? query + 1 : n), 0), counts = [queries.length];
    let now = new Int32Array(n * words), bits = now, isFinal = false;
    queries.forEach((query, i) => (now[query * words + (i >>> 5)] = 1 << (i & 31) | now[query * words + (i >>> 5)]));
    while (!isFinal && counts.length <= explorer.LIMITS.layers) {
      const next = now.slice(), union = new Int32Array(words);
      for (const group of all) joinGroup(next, now, group, union.fill(0), isCausal);
      if (state.window > 1) joinWindow(next, now, words, state.window, isCausal);
      let count = 0;
      for (let i = 0; i < next.length; i++) count += bitsOf(next[i]);
      isFinal = count === counts.at(-1);
      if (!isFinal) counts.push(count);
      now = next;
      if (counts.length - 1 <= layers) bits = now;
    }
    return { words, bits, counts, every, isFinal };
  }

  // A query that has seen a token of the group sees, a layer later, the keys of the group; causal: the keys before that token.
  function joinGroup(next, now, { first, rate, end, reads = end, writes = end }, union, isCausal) {
    const words = union.length, last = first + Math.floor((end - 1 - first) / rate) * rate;
    const read = (token) => {
      for (let i = 0, at = token * words; i < words; i++) union[i] |= now[at + i];
    };
    for (let token = first; !isCausal && token < reads; token += rate) read(token);
    for (let token = last; token >= first; token -= rate) {
      if (isCausal) read(token);
      for (let i = 0, at = token * words; i < words && token < writes; i++) next[at + i] |= union[i];
    }
  }

  // Each row takes the union of the rows in the window after it and, not causal, before it. Every step at most doubles the number of rows.
  function joinWindow(next, now, words, window, isCausal) {
    const near = now.slice(), size = Math.min(window, now.length / words);
    for (let taken = 1; taken < size; taken += Math.min(taken, size - taken)) {
      const shift = Math.min(taken, size - taken) * words;
      for (let i = 0; i + shift < now.length; i++) near[i] |= near[i + shift];
      for (let i = now.length - 1; !isCausal && i >= shift; i--) near[i] |= near[i - shift];
    }
    for (let i = 0; i < now.length; i++) next[i] |= near[i];
  }

  function bitsOf(word) {
    word -= (word >>> 1) & 0x55555555;
    word = (word & 0x33333333) + ((word >>> 2) & 0x33333333);
    return (((word + (word >>> 4)) & 0x0f0f0f0f) * 0x01010101) >>> 24;
  }

  const reachOf = (state) => (state.seq_len > MOST_FOLLOWED ? null : follow(state, [state.query]));
  const reach = (state) => (state.seq_len > MOST_REACHED ? null : follow(state, Array.from({ length: state.seq_len }, (_, query) => query)));

  // The number of reached pairs per cell of c x c pairs: queries down, tokens across.
  function reachPicture({ bits, words }, numTokens) {
    const c = explorer.tokensPerCell(numTokens), cells = ceilDiv(numTokens, c), counts = new Float64Array(cells * cells);
    for (let token = 0; token < numTokens; token++) {
      for (let query = 0; query < numTokens; query++) {
        const seen = (bits[token * words + (query >>> 5)] >>> (query & 31)) & 1;
        if (seen) counts[Math.floor(query / c) * cells + Math.floor(token / c)]++;
      }
    }
    return { cells, tokensPerCell: c, counts };
  }

  // Tokens that no head of a branch keeps, per branch of segments.
  const lost = (state) => explorer.segmentsOf(explorer.allBranchesOf(state)).map(({ index, length, rate }) => {
    const kept = (tokens) => [...explorer.offsetsOf(state, index).keys()].reduce((sum, offset) => sum + explorer.numKept(tokens, rate, offset), 0);
    return state.seq_len - Math.floor(state.seq_len / length) * kept(length) - kept(state.seq_len % length);
  });

  // Tokens that no head of any branch keeps: they neither attend nor are seen.
  function uncovered(state) {
    if (state.window !== null || state.global_tokens) return 0;
    if (state.seq_len > MOST_FOLLOWED) return null;
    const kept = new Uint8Array(state.seq_len);
    for (const { first, rate, end } of groups(state)) for (let token = first; token < end; token += rate) kept[token] = 1;
    return kept.reduce((sum, isKept) => sum - isKept, state.seq_len);
  }

  // -- boundaries, as flexdilated/core/boundaries.py ---------------------------------------------------------------------------

  const MOST_LOOKS = 128;

  // The first position that stops the pattern from being connected, or null.
  function boundary(state) {
    if (state.window > 1) return null; // each token sees the one before it
    const n = state.seq_len, branches = explorer.segmentsOf(explorer.allBranchesOf(state))
      .map((branch) => ({ ...branch, offsets: explorer.offsetsOf(state, branch.index) }));
    const run = explorer.lcm(branches.filter(({ rate }) => rate === 1).map(({ length }) => length), n); // rate 1 joins its tokens, each to the next
    const far = branches.filter(({ rate, offsets }) => rate > 1 && 2 * rate - 1 <= run && offsets.size === rate);
    if (far.some(({ length }) => length >= n)) return null;
    const distance = Math.max(1, ...far.map(({ rate }) => 2 * rate - 1)), step = Math.max(run, ...far.map(({ length }) => length));
    let looks = 0;
    for (let end = step; end - run < n; end += step) {
      for (const at of new Set([Math.floor(end / run) * run, ceilDiv(end, run) * run])) { // the boundaries nearest to the end of a longest segment
        const isNear = [1, -1].some((sign) => far.every(({ length, rate }) => mod(sign * at, length) < rate));
        if (at <= state.global_tokens || at >= n || !isNear) continue;
        if (distance > MOST_LOOKS || ++looks === MOST_LOOKS || !isCrossed(at, branches, distance, state)) return at;
      }
    }
    return null;
  }

  // Whether tokens from a boundary on receive from all that are `distance` or more before them.
  function isCrossed(at, branches, distance, { seq_len: n, global_tokens: globals }) {
    const first = Math.max(at - 3 * distance, 0), received = [], upTo = (count) => (1n << BigInt(Math.max(count, 0))) - 1n;
    for (let q = first; q < Math.min(at + 3 * distance, n); q++) {
      let bits = (1n << BigInt(q - first)) | upTo(Math.min(globals, q) - first);
      for (const { length, rate, offsets } of branches) {
        if (q - first >= rate && rate <= q % length && offsets.has((q % length) % rate)) bits |= received[q - first - rate];
      }
      received.push(bits);
      const wanted = upTo(q - distance + 1 - first);
      if (q >= at && (bits & wanted) !== wanted) return false;
    }
    return true;
  }

  Object.assign(explorer, { MOST_REACHED, boundary, lost, reach, reachOf, reachPicture, uncovered });
})();
