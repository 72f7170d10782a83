// Whole heads instead of rows: of a cut segment where that is less, each head goes to one rank, which sends its outputs back. As the
// exchange "heads" of flexdilated/distributed/plan.py counts it.
"use strict";

(() => {
  const { ceilDiv, mod } = explorer;
  const LSE_BYTES = 4; // of the log-sum-exp that travels with an output

  // What whole heads move: rows by kind, `rows[receiver][sender]`, and the bytes that each rank receives in a forward. Where they are
  // nowhere less, the rows of `gather` itself.
  function wholeHeads(state, limits, gather) {
    const lonely = (rows) => rows.every((row) => row.every((count) => !count));
    const branches = lonely(gather.kv) && lonely(gather.q) ? [] : explorer.branchesOf(state).map((branch) => dealt(branch, state, limits));
    const pays = branches.some(({ segments }) => segments.length);
    const none = limits.slice(1).map(() => limits.slice(1).map(() => 0));
    const rows = pays ? moved(state, limits, branches) : { kv: gather.kv, q: gather.q, out: none };
    return { pays, ...rows, bytes: bytesOf(state, rows) };
  }

  function bytesOf({ num_heads: heads, num_kv_heads: kvHeads, head_dim: dim, itemsize }, { kv, q, out }) {
    const group = heads / kvHeads, sum = (values) => values.reduce((total, value) => total + value, 0);
    return kv.map((row, rank) => sum(row) * 2 * dim * itemsize + sum(q[rank]) * group * dim * itemsize +
      sum(out[rank]) * group * (dim * itemsize + LSE_BYTES));
  }

  const rankOf = (limits, token) => limits.findLastIndex((first) => first <= token);

  // The tokens of a run that a rank holds, counted from its first.
  const held = (limits, token, size, rank) =>
    [limits[rank], limits[rank + 1]].map((limit) => Math.min(Math.max(limit - token, 0), size));

  // Of a branch the cut segments where whole heads travel less than rows, each with the rank of every head.
  function dealt({ index, length, rate }, state, limits) {
    const n = state.seq_len, w = Math.min(length, n), out = state.zero_padding ? w + mod(-w, rate) : w;
    const [first, end] = explorer.headRange(state, index);
    const segments = cutSegments(limits, n, w, out).map((s) => {
      const token = s * w, size = Math.min(w, n - token);
      const slots = out !== w && n > w && size === w ? out : size;
      const outputs = Math.min(Math.max(0, n - s * out), slots);
      const ranks = Array.from({ length: end - first }, (_, place) =>
        rankOf(limits, token + Math.floor(((2 * place + 1) * size) / Math.max(1, 2 * (end - first)))));
      return { s, token, size, outputs, outToken: s * out, ranks };
    });
    return { index, rate, first, segments: segments.filter((segment) => isLess(segment, state, limits)) };
  }

  // The segments that hold, or write to, tokens of several shards.
  function cutSegments(limits, n, w, out) {
    const found = [];
    for (const at of new Set(limits.slice(1, -1).filter((limit) => 0 < limit && limit < n))) {
      for (let s = Math.max(Math.floor(at / out), found.length ? found.at(-1) + 1 : 0); s <= Math.floor((at - 1) / w); s++) found.push(s);
    }
    return found;
  }

  function isLess({ token, size, ranks }, state, limits) {
    const first = rankOf(limits, token), last = rankOf(limits, token + size - 1);
    if (first === last) return false;
    let byRows = 0, byHeads = 0;
    for (let rank = first; rank <= last; rank++) {
      const [low, high] = held(limits, token, size, rank);
      if (low < high) byRows += 2 * (state.is_causal ? low : size - (high - low)) * ranks.length;
    }
    for (const rank of ranks) {
      const [low, high] = held(limits, token, size, rank);
      byHeads += (2 + (2 * state.num_heads) / state.num_kv_heads) * (size - (high - low));
    }
    return byHeads < byRows;
  }

  function moved(state, limits, branches) {
    const matrix = () => limits.slice(1).map(() => limits.slice(1).map(() => 0));
    const kv = matrix(), q = matrix(), out = matrix();
    const taken = new Map(branches.map(({ index, segments }) => [index, new Set(segments.map(({ s }) => s))]));
    for (let head = 0; head < state.num_kv_heads; head++) {
      const own = explorer.headBranches(state, head);
      for (const [kind, rows] of [["kv", kv], ["q", q]]) {
        rows.forEach((row, receiver) => {
          const parts = explorer.neededRows(state, own, limits, receiver, kind, taken);
          for (const run of dealtRuns(own, branches, head)) {
            if (run.rank !== receiver) continue;
            const end = run.token + (kind === "kv" && !state.is_causal ? run.size : Math.min(run.outputs, run.size));
            for (const [a, b] of [[run.token, Math.min(end, limits[receiver])], [Math.max(run.token, limits[receiver + 1]), end]]) {
              if (a < b) parts.push({ first: run.token + run.offset, rate: run.rate, begin: a, end: b });
            }
          }
          if (parts.length) explorer.shareRows(row, parts, 1, limits);
        });
      }
      const sent = new Map();
      for (const run of dealtRuns(own, branches, head)) {
        const { outToken: begin, outputs, rate, offset, rank } = run;
        sent.set(rank, [...(sent.get(rank) || []), { first: begin + offset, rate, begin, end: begin + outputs }]);
      }
      for (const [sender, parts] of sent) {
        const row = limits.slice(1).map(() => 0);
        explorer.shareRows(row, parts, 1, limits);
        row.forEach((count, receiver) => (out[receiver][sender] += receiver === sender ? 0 : count));
      }
    }
    return { kv, q, out };
  }

  // The segments that one head's rank computes whole; an offset without outputs asks for nothing.
  function dealtRuns(own, branches, head) {
    return own.flatMap(({ index, rate, offset }) => branches[index].segments
      .filter(({ outputs }) => offset < Math.min(outputs, rate))
      .map((segment) => ({ ...segment, rate, offset, rank: segment.ranks[head - branches[index].first] })));
  }

  Object.assign(explorer, { wholeHeads });
})();
