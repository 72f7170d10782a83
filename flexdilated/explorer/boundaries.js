// Whether causal information crosses all boundaries of segments: DilatedPattern.first_uncrossed_boundary.
"use strict";

(() => {
  const gcd = (a, b) => (b ? gcd(b, a % b) : a);
  const mod = (a, b) => ((a % b) + b) % b;

  // The x in [0, m) with a x = 1 modulo m, for a without a common divisor with m.
  function inverse(a, m) {
    let [r, s, x, y] = [mod(a, m), m, 1n, 0n];
    while (s) [r, s, x, y] = [s, r % s, y, x - (r / s) * y];
    return mod(x, m);
  }

  // As flexdilated/core/boundaries.py.
  function firstNearEnds(start, step, branches, sign, last, limit) {
    const at = last < start ? start : start + step * ((last - start) / step + 1n);
    if (at >= limit || !branches.length) return at < limit ? at : limit;
    const [[length, rate], ...rest] = branches;
    const common = gcd(step, length), parts = length / common, by = inverse(step / common, parts);
    for (let distance = mod(sign * start, common); distance < rate; distance += common) {
      const times = mod(((sign * distance - start) / common) * by, parts);
      limit = firstNearEnds(start + step * times, step * parts, rest, sign, last, limit);
    }
    return limit;
  }

  function keptOffsets(state, { index }) {
    const [first, end] = explorer.headRange(state, index);
    return new Set(Array.from({ length: end - first }, (_, i) => explorer.offset(state, index, first + i)));
  }

  // As flexdilated/core/boundaries.py.
  function isCrossed(boundary, branches, distance, tokens, globalTokens) {
    const first = Math.max(boundary - 3 * distance, 0), received = [];
    for (let q = first; q < Math.min(boundary + 3 * distance, tokens); q++) {
      const globals = BigInt(Math.max(Math.min(globalTokens, q) - first, 0));
      let bits = (1n << BigInt(q - first)) | ((1n << globals) - 1n);
      for (const { length, rate, kept } of branches) {
        if (q - first >= rate && rate <= q % length && kept.has((q % length) % rate)) bits |= received[q - first - rate];
      }
      received.push(bits);
      const wanted = (1n << BigInt(Math.max(q - distance + 1 - first, 0))) - 1n;
      if (q >= boundary && (bits & wanted) !== wanted) return false;
    }
    return true;
  }

  // The first position that stops the pattern from being connected, or null.
  function firstUncrossedBoundary(state) {
    if (state.window > 1) return null; // each token sees the one before it
    const branches = explorer.branchesOf(state).map((branch) => ({ ...branch, kept: keptOffsets(state, branch) }));
    const tokens = BigInt(state.seq_len);
    let run = 1n; // tokens in which rate-1 branches join each token to the next
    for (const { length, rate } of branches) if (rate === 1) run = (run / gcd(run, BigInt(length))) * BigInt(length);
    const far = branches.filter((branch) => branch.rate > 1 && 2 * branch.rate - 1 <= run && branch.kept.size === branch.rate)
      .map(({ length, rate }) => [BigInt(length), BigInt(rate)]);
    if (far.some(([length]) => length >= tokens)) return null;
    far.sort(([a], [b]) => (a < b ? 1 : a > b ? -1 : 0));
    const distance = far.reduce((most, [, rate]) => Math.max(most, 2 * Number(rate) - 1), 1), MOST_LOOKS = 128;
    let boundary = BigInt(Math.min(state.global_tokens, state.seq_len));
    for (let look = 0; look < MOST_LOOKS; look++) {
      const [after, before] = [1n, -1n].map((sign) => firstNearEnds(0n, run, far, sign, boundary, tokens));
      boundary = after < before ? after : before;
      if (boundary === tokens) return null;
      if (distance > MOST_LOOKS || !isCrossed(Number(boundary), branches, distance, state.seq_len, state.global_tokens)) break;
    }
    return Number(boundary);
  }

  Object.assign(explorer, { firstUncrossedBoundary });
})();
