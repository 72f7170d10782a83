// Heads instead of rows: of a cut segment where that is less, or shares out causal work, heads or parts of them go to the ranks that
// compute them, which send the outputs back. As the exchange "heads" of flexdilated/distributed/plan.py counts it.
"use strict";

(() => {
  const LSE_BYTES = 4; // of the log-sum-exp that travels with an output

  // What dealt heads move: rows by kind, `rows[receiver][sender]`, and the bytes that each rank receives in a forward. Where heads are
  // dealt of no segment, the rows of `gather` itself.
  function trafficOfHeads(state, limits, gather) {
    const lonely = (rows) => rows.every((row) => row.every((count) => !count));
    const branches = lonely(gather.kv) && lonely(gather.q) ? [] : explorer.dealtHeads(state, limits);
    const pays = branches.some(({ dealt }) => dealt.length);
    const rows = pays ? moved(state, limits, branches) : { kv: gather.kv, q: gather.q, out: matrix(limits) };
    return { pays, ...rows, bytes: bytesOf(state, rows) };
  }

  const matrix = (limits) => limits.slice(1).map(() => limits.slice(1).map(() => 0));

  function bytesOf({ num_heads: heads, num_kv_heads: kvHeads, head_dim: dim, itemsize }, { kv, q, out }) {
    const group = heads / kvHeads, sum = (values) => values.reduce((total, value) => total + value, 0);
    return kv.map((row, rank) => sum(row) * 2 * dim * itemsize + sum(q[rank]) * group * dim * itemsize +
      sum(out[rank]) * group * (dim * itemsize + LSE_BYTES));
  }

  function moved(state, limits, branches) {
    const rows = { kv: matrix(limits), q: matrix(limits), out: matrix(limits) };
    const dealt = new Map(branches.map(({ index, dealt: segments }) => [index, new Set(segments.map(({ s }) => s))]));
    const runs = { kv: limits.slice(1).map(() => new Map()), q: limits.slice(1).map(() => new Map()) };
    for (const { heads, own, parts } of alike(state, branches)) {
      for (const kind of ["kv", "q"]) {
        const byRank = needs(parts, kind, state);
        rows[kind].forEach((row, receiver) => {
          const needed = explorer.neededRows(state, own, limits, receiver, kind, dealt, runs[kind][receiver]);
          for (const run of byRank.get(receiver) || []) {
            for (const [begin, end] of [[run.begin, Math.min(run.end, limits[receiver])], [Math.max(run.begin, limits[receiver + 1]), run.end]]) {
              if (begin < end) needed.push({ ...run, begin, end });
            }
          }
          if (needed.length) explorer.shareRows(row, needed, heads, limits);
        });
      }
      for (const [sender, sent] of needs(parts, "out", state)) {
        const row = limits.slice(1).map(() => 0);
        explorer.shareRows(row, sent, heads, limits);
        row.forEach((count, receiver) => (rows.out[receiver][sender] += receiver === sender ? 0 : count));
      }
    }
    return rows;
  }

  // Heads that keep the same and are computed by the same ranks: how many, their `own` branches, and their parts of dealt segments.
  function alike(state, branches) {
    const found = [];
    for (const { heads, branches: own } of explorer.headClasses(state)) {
      const known = new Map();
      for (const head of heads) {
        const parts = own.flatMap(({ index, rate, offset }) => partsOf(branches[index], head - branches[index].first, rate, offset));
        const key = parts.map(({ rank, low, high }) => `${rank},${low},${high}`).join(";");
        if (known.has(key)) known.get(key).heads++;
        else known.set(key, { heads: 1, own, parts });
      }
      found.push(...known.values());
    }
    return found;
  }

  // The parts of one head of a branch; an offset whose queries lie behind the others' asks for nothing.
  const partsOf = ({ dealt }, at, rate, offset) => dealt.flatMap(({ parts, ...segment }) => parts
    .filter(({ place, places, low, high }) => place <= at && at < place + places && offset < high - low)
    .map(({ rank, low, high }) => ({ ...segment, rate, offset, rank, low, high })));

  // What the ranks that compute parts need of them, or send back: progressions of tokens by rank.
  function needs(parts, kind, { is_causal: isCausal }) {
    const found = new Map();
    for (const { token, outToken, size, rate, offset, rank, low, high } of parts) {
      const origin = kind === "out" ? outToken : token;
      const begin = kind === "kv" ? 0 : low;
      const end = kind === "out" ? high : kind === "kv" && !isCausal ? size : Math.min(high, size);
      if (!found.has(rank)) found.set(rank, []);
      if (begin < end) found.get(rank).push({ first: origin + offset, rate, begin: origin + begin, end: origin + end });
    }
    return found;
  }

  Object.assign(explorer, { trafficOfHeads });
})();
