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
  function firstNearEnds(start, step, branches, sign, limit) {
    const at = start || step;
    if (at >= limit || !branches.length) return at < limit ? at : limit;
    const [[length, rate], ...rest] = branches;
    const common = gcd(step, length), parts = length / common, by = inverse(step / common, parts);
    for (let distance = mod(sign * start, common); distance < rate; distance += common) {
      const times = mod(((sign * distance - start) / common) * by, parts);
      limit = firstNearEnds(start + step * times, step * parts, rest, sign, limit);
    }
    return limit;
  }

  function keepsEveryResidue(state, { index, rate }) {
    const [first, end] = explorer.headRange(state, index);
    return new Set(Array.from({ length: end - first }, (_, i) => explorer.offset(state, index, first + i))).size === rate;
  }

  // The first position that stops the pattern from being connected, or null.
  function firstUncrossedBoundary(state) {
    const branches = explorer.branchesOf(state), tokens = BigInt(state.seq_len);
    let run = 1n; // tokens in which rate-1 branches join each token to the next
    for (const { length, rate } of branches) if (rate === 1) run = (run / gcd(run, BigInt(length))) * BigInt(length);
    const far = branches.filter((branch) => branch.rate > 1 && 2 * branch.rate - 1 <= run && keepsEveryResidue(state, branch))
      .map(({ length, rate }) => [BigInt(length), BigInt(rate)]);
    if (far.some(([length]) => length >= tokens)) return null;
    far.sort(([a], [b]) => (a < b ? 1 : a > b ? -1 : 0));
    const [after, before] = [1n, -1n].map((sign) => firstNearEnds(0n, run, far, sign, tokens));
    const first = after < before ? after : before;
    return first < tokens ? Number(first) : null;
  }

  Object.assign(explorer, { firstUncrossedBoundary });
})();
