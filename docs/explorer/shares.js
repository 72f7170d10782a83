// Who computes which part of the heads of cut segments, so that all ranks end together: as flexdilated/distributed/shares.py deals them,
// after the pairs that flexdilated/distributed/work.py counts. Pairs are BigInts: they grow with the square of the segment.
"use strict";

(() => {
  const { ceilDiv, mod, numKept } = explorer;
  const MOST = [5n, 4n]; // quarters of its part of the tokens are what a rank takes of a segment: more would travel than it saves
  const LEAST = 32; // a head is not cut for less than one in so many of the queries that a rank takes: its keys would travel once more
  const UNITS = 2n ** 28n; // of pairs and tokens at most, larger ones where a segment has more

  const sum = (values) => values.reduce((total, value) => total + value, 0);

  // Per branch the cut segments whose heads are dealt to ranks, each with its `parts`: of `places` heads from `place` on, `rank` computes
  // the queries of slots `low ... high`.
  function dealtHeads(state, limits) {
    const branches = explorer.branchesOf(state).map((branch) => cutOf(branch, state, limits));
    if (!branches.some(({ dealt }) => dealt.length)) return branches;
    const pairs = limits.slice(1).map(() => 0n);
    for (const branch of branches) {
      addShards(pairs, branch, state, limits);
      addRows(pairs, branch, state, limits);
    }
    // The widest last: most ranks can make good what is left uneven.
    for (const branch of [...branches].sort((a, b) => a.length - b.length)) {
      for (const segment of branch.dealt) segment.parts = partsOf(segment, branch, pairs, state, limits);
    }
    return branches;
  }

  // -- cut segments ------------------------------------------------------------------------------------------------------------

  const rankOf = (limits, token) => limits.findLastIndex((first) => first <= token);

  // The tokens of a run that a rank holds, counted from its first.
  const held = (limits, token, size, rank) =>
    [limits[rank], limits[rank + 1]].map((limit) => Math.min(Math.max(limit - token, 0), size));

  // The segments of a branch that the shards cut: `dealt`, those whose heads are, and the `rest`. `offsets` are [offset, how many heads].
  function cutOf({ index, length, rate }, state, limits) {
    const n = state.seq_len, w = Math.min(length, n), out = state.zero_padding ? w + mod(-w, rate) : w;
    const [first, end] = explorer.headRange(state, index);
    const offsets = new Map();
    for (let head = first; head < end; head++) {
      const offset = explorer.offset(state, index, head);
      offsets.set(offset, (offsets.get(offset) || 0) + 1);
    }
    const dealt = [], rest = [];
    for (const s of cutSegments(limits, n, w, out)) {
      const token = s * w, size = Math.min(w, n - token);
      const slots = out !== w && n > w && size === w ? out : size;
      const segment = { s, token, size, outputs: Math.min(Math.max(0, n - s * out), slots), outToken: s * out };
      (pays(segment, state, limits) ? dealt : rest).push(segment);
    }
    return { index, length, rate, w, out, first, heads: end - first, offsets: [...offsets], dealt, rest };
  }

  // The segments that hold, or write to, tokens of several shards.
  function cutSegments(limits, n, w, out) {
    const found = [];
    for (const at of new Set(limits.slice(1, -1).filter((limit) => 0 < limit && limit < n))) {
      for (let s = Math.max(Math.floor(at / out), found.length ? found.at(-1) + 1 : 0); s <= Math.floor((at - 1) / w); s++) found.push(s);
    }
    return found;
  }

  // The ranks that hold tokens of a segment, and how many each.
  function holders({ token, size }, limits) {
    const ranks = [], tokens = [];
    for (let rank = rankOf(limits, token), last = rankOf(limits, token + size - 1); rank <= last; rank++) {
      const [low, high] = held(limits, token, size, rank);
      if (low < high) [ranks[ranks.length], tokens[tokens.length]] = [rank, high - low];
    }
    return { ranks, tokens };
  }

  // Whether heads of a segment travel less than rows; and, to share out causal work, where a segment is the whole sequence.
  function pays(segment, state, limits) {
    const { size } = segment, { ranks, tokens } = holders(segment, limits);
    if (ranks.length < 2) return false;
    if (state.is_causal && size === state.seq_len) return true;
    // What ranks need: the tokens of others, or of those before. Who computes a head holds as many as the rank of a token on average.
    const byRows = sum(ranks.map((rank, i) => 2 * (state.is_causal ? Math.max(0, limits[rank] - segment.token) : size - tokens[i])));
    const own = Number(tokens.reduce((total, count) => total + BigInt(count) ** 2n, 0n) / BigInt(size));
    return (2 + (2 * state.num_heads) / state.num_kv_heads) * (size - own) < byRows;
  }

  // -- pairs -------------------------------------------------------------------------------------------------------------------

  // Pairs of the queries `low ... high` of so many rows.
  const scored = (rows, low, high, isCausal) =>
    isCausal ? (BigInt(high - low) * BigInt(high + low + 1)) / 2n : BigInt(high - low) * BigInt(rows);

  // Of a segment of so many tokens the pairs that all heads of a branch score for outputs `low ... high`.
  function pairsOf({ offsets, rate }, size, low, high, isCausal) {
    let total = 0n;
    for (const [offset, heads] of offsets) {
      const rows = numKept(size, rate, offset);
      const [from, to] = [low, high].map((slot) => Math.min(numKept(slot, rate, offset), rows));
      total += BigInt(heads) * scored(rows, from, to, isCausal);
    }
    return total;
  }

  // The segments that lie inside one shard, with their outputs: whole ones with all outputs, the one whose outputs the end of the
  // sequence cuts, and the last.
  function addShards(pairs, branch, state, limits) {
    const n = state.seq_len, { w, out } = branch;
    const whole = Math.floor(n / w), shown = Math.floor(n / out), segments = ceilDiv(n, w);
    const each = (size, outputs) => pairsOf(branch, size, 0, outputs, state.is_causal);
    const full = each(w, w), edge = each(w, n - shown * out), last = each(n - whole * w, Math.max(0, n - whole * out));
    for (let rank = 0; rank < pairs.length; rank++) {
      const begin = ceilDiv(limits[rank], w), end = limits[rank + 1] === n ? segments : Math.min(Math.floor(limits[rank + 1] / out), segments);
      pairs[rank] += BigInt(Math.max(0, Math.min(end, whole, shown) - begin)) * full;
      if (begin <= shown && shown < Math.min(end, whole)) pairs[rank] += edge;
      if (begin <= whole && whole < end) pairs[rank] += last;
    }
  }

  // The cut segments whose outputs each rank computes that holds them.
  function addRows(pairs, branch, state, limits) {
    for (const { size, outputs, outToken } of branch.rest) {
      if (!outputs) continue;
      for (let rank = rankOf(limits, outToken), last = rankOf(limits, outToken + outputs - 1); rank <= last; rank++) {
        pairs[rank] += pairsOf(branch, size, ...held(limits, outToken, outputs, rank), state.is_causal);
      }
    }
  }

  // -- who computes what -------------------------------------------------------------------------------------------------------

  // The heads of a segment, one behind another, and in each its queries, are one line of work, of which ranks take an interval each. The
  // parts' pairs are added to those that each rank has. Rows are those of the first offset, none of them behind the tokens; others keep as
  // many or one less.
  function partsOf(segment, { rate, heads }, pairs, { is_causal: isCausal }, limits) {
    const { size, outputs } = segment, { ranks, tokens } = holders(segment, limits);
    const rows = ceilDiv(size, rate), asked = ceilDiv(outputs, rate);
    const parts = [];
    const taken = shares(ranks.map((rank) => pairs[rank]), tokens, scored(rows, 0, asked, isCausal) * BigInt(heads));
    let begin = 0;
    ends(taken, heads, asked, isCausal).forEach((end, i) => {
      while (begin < end) {
        const place = Math.floor(begin / asked), first = begin % asked;
        const places = first ? 1 : Math.max(1, Math.floor((end - begin) / asked));
        const last = Math.min(asked, end - place * asked);
        pairs[ranks[i]] += BigInt(places) * scored(rows, first, last, isCausal);
        parts.push({ place, places, rank: ranks[i], low: first * rate, high: last === asked ? outputs : last * rate });
        begin = (place + places - 1) * asked + last;
      }
    });
    return parts;
  }

  // How much of some work each rank takes, in any unit, that has scored so many pairs and holds so many tokens of it: what fills all of
  // them to one level.
  function shares(pairs, tokens, total) {
    const unit = 1n + total / UNITS, work = 1n + total / unit;
    const have = pairs.map((count) => count / unit);
    const size = 1n + BigInt(sum(tokens)) / UNITS;
    const parts = tokens.map((count) => above(BigInt(count), size)), whole = parts.reduce((all, part) => all + part);
    const most = parts.map((part) => above(MOST[0] * work * part, MOST[1] * whole));
    // What is taken up to a level grows by one for each rank between the pairs that it has and the most that it takes.
    const turns = [...have.map((at) => [at, 1n]), ...have.map((at, i) => [at + most[i], -1n])].sort(([a], [b]) => Number(a - b));
    let at = 0n, taken = 0n, taking = 0n;
    for (const [turn, change] of turns) {
      if (taken + taking * (turn - at) > work) break;
      [at, taken, taking] = [turn, taken + taking * (turn - at), taking + change];
    }
    const level = at + above(work - taken, taking);
    return have.map((count, i) => (level < count ? 0 : Number(level - count < most[i] ? level - count : most[i])));
  }

  const above = (a, b) => (a + b - 1n) / b;

  // Where each rank's interval ends, in the queries of all heads one behind another.
  function ends(taken, heads, asked, isCausal) {
    const total = sum(taken), least = LEAST * ceilDiv(taken.length, heads); // parts of a head, where it has several ranks
    let upTo = 0;
    return taken.map((share) => {
      upTo += share;
      const rest = ((upTo * heads) % total) / total;
      // The pairs of causal queries grow with the square. A quotient and a root are rounded alike everywhere.
      const row = rounded(asked * (isCausal ? Math.sqrt(rest) : rest));
      const cut = row * least < asked ? 0 : (asked - row) * least < asked ? asked : row;
      return Math.floor((upTo * heads) / total) * asked + cut;
    });
  }

  // To the nearest integer, halves to the even one.
  function rounded(value) {
    const below = Math.floor(value), rest = value - below;
    return rest > 0.5 || (rest === 0.5 && below % 2) ? below + 1 : below;
  }

  Object.assign(explorer, { dealtHeads });
})();
