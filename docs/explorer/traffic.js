// A sequence in shards over ranks, and the rows that travel: exact unions over branches, as flexdilated/distributed/plan.py counts them.
"use strict";

(() => {
  const { ceilDiv, mod, numKept } = explorer;

  const BEYOND = 2 ** 50; // no sequence is so long

  // -- unions of progressions --------------------------------------------------------------------------------------------------

  // How many different integers progressions hold: { first, rate, begin, end } are those of first + k * rate in [begin, end).
  function countUnion(progressions) {
    const edges = [...new Set(progressions.flatMap(({ begin, end }) => [begin, end]))].sort((a, b) => a - b);
    const ordered = [...progressions].sort((a, b) => a.begin - b.begin);
    let total = 0, next = 0, covering = [];
    for (let i = 0; i + 1 < edges.length; i++) {
      while (next < ordered.length && ordered[next].begin <= edges[i]) covering.push(ordered[next++]);
      covering = covering.filter(({ end }) => end > edges[i]);
      total += countCell(covering.map(({ first, rate }) => [mod(first, rate), rate]), edges[i], edges[i + 1]);
    }
    return total;
  }

  // Integers of [begin, end) in any of the residue classes, by inclusion and exclusion.
  function countCell(classes, begin, end) {
    const needed = classes.filter(
      ([a, r], i) => !classes.some(([b, s], j) => i !== j && r % s === 0 && a % s === b && (r !== s || j < i)),
    );
    const count = (from, residue, modulus, sign) => {
      let total = sign * countClass(residue, modulus, begin, end);
      if (!total) return 0;
      for (let i = from; i < needed.length; i++) {
        const both = intersection(residue, modulus, ...needed[i]);
        if (both) total += count(i + 1, ...both, -sign);
      }
      return total;
    };
    return needed.reduce((sum, [residue, rate], i) => sum + count(i + 1, residue, rate, 1), 0);
  }

  function countClass(residue, modulus, begin, end) {
    if (modulus === Infinity) return begin <= residue && residue < end ? 1 : 0;
    const first = begin + mod(residue - begin, modulus);
    return first < end ? Math.floor((end - 1 - first) / modulus) + 1 : 0;
  }

  // The class of integers in two classes, by the Chinese remainder theorem; null where it holds none of a sequence. A modulus beyond
  // all sequences is infinite: the class is one integer.
  function intersection(a, r, b, s) {
    if (r === Infinity) return a % s === b ? [a, r] : null;
    const [divisor, inverse] = euclid(r, s);
    if ((b - a) % divisor) return null;
    const step = s / divisor;
    const times = Number(((BigInt((b - a) / divisor) * BigInt(inverse)) % BigInt(step) + BigInt(step)) % BigInt(step));
    const residue = a + r * times, modulus = r * step;
    if (modulus <= BEYOND) return [residue, modulus];
    return residue <= BEYOND ? [residue, Infinity] : null;
  }

  // The greatest common divisor of r and s, and u with u r = divisor modulo s.
  function euclid(r, s) {
    let [a, b, u, v] = [r, s, 1, 0];
    while (b) {
      const q = Math.floor(a / b);
      [a, b, u, v] = [b, a - q * b, v, u - q * v];
    }
    return [a, u];
  }

  // -- shards ------------------------------------------------------------------------------------------------------------------

  // Where shards begin, and the end: as equal as can be, the first ones one longer.
  function borders(numTokens, ranks) {
    const length = Math.floor(numTokens / ranks), longer = numTokens % ranks;
    return Array.from({ length: ranks + 1 }, (_, rank) => rank * length + Math.min(rank, longer));
  }

  // The runs of tokens that the outputs of one rank need of others, of keys with values or of queries. A run belongs to one segment;
  // of its offsets `residues` from `residue` on take part. `without` are segments that are left out.
  function runsOf(branch, state, low, high, kind, without = new Set()) {
    const numTokens = state.seq_len;
    const w = Math.min(branch.length, numTokens);
    // torchscale writes a segment at whole rates; where the rate does not divide it, outputs move away from their tokens.
    const out = state.zero_padding ? w + mod(-w, branch.rate) : w;
    const segments = ceilDiv(numTokens, w);
    const firstSegment = Math.floor(low / out), lastSegment = Math.min(Math.floor((high - 1) / out), segments - 1);
    const found = [];
    for (let s = firstSegment; s <= lastSegment; s++) {
      if (out === w && s > firstSegment && s < lastSegment) s = lastSegment; // those between lie inside the shard
      if (without.has(s)) continue;
      const token = s * w, outToken = s * out;
      const isWhole = token + w <= numTokens;
      const size = isWhole ? w : numTokens - token;
      const slots = out !== w && numTokens > w && isWhole ? out : size;
      const outputs = Math.min(Math.max(0, numTokens - outToken), slots);
      const from = Math.max(0, low - outToken), to = Math.min(outputs, high - outToken);
      if (from >= to) continue;
      const few = kind === "kv" && to - from < branch.rate;
      const begin = kind === "q" ? from : 0;
      const end = kind === "q" ? Math.min(size, to) : state.is_causal ? Math.min(size, to) : size;
      const run = { origin: token, residue: few ? from % branch.rate : 0, residues: few ? to - from : branch.rate };
      // What lies before the shard, and behind it.
      for (const [a, b] of [[token + begin, Math.min(token + end, low)], [Math.max(token + begin, high), token + end]]) {
        if (a < b) found.push({ ...run, begin: a, end: b });
      }
    }
    return found;
  }

  // Rows (token, key/value head) that each rank receives of each other: `rows[receiver][sender]`, keys with values and queries; and
  // `heads`, the same where heads are dealt to ranks.
  function traffic(state) {
    const limits = borders(state.seq_len, state.ranks);
    const classes = explorer.headClasses(state);
    const rows = (kind) => limits.slice(0, -1).map((_, receiver) => received(state, classes, limits, receiver, kind));
    const kv = rows("kv");
    const q = rows("q");
    return { borders: limits, kv, q, heads: explorer.trafficOfHeads(state, limits, { kv, q }), ...summary(state, limits, kv, q) };
  }

  function received(state, classes, limits, receiver, kind) {
    const row = limits.slice(1).map(() => 0), runs = new Map();
    for (const { heads, branches } of classes) {
      const parts = neededRows(state, branches, limits, receiver, kind, new Map(), runs);
      if (parts.length) shareRows(row, parts, heads.length, limits);
    }
    return row;
  }

  // The rows of others that the outputs of a rank need, as progressions, for a head that runs these branches; `without` are segments
  // that are left out, by branch.
  function neededRows(state, branches, limits, receiver, kind, without, runs = new Map()) {
    const [low, high] = [limits[receiver], limits[receiver + 1]];
    const parts = [];
    if (low === high) return parts;
    for (const branch of branches) {
      if (!runs.has(branch.index)) runs.set(branch.index, runsOf(branch, state, low, high, kind, without.get(branch.index)));
      for (const run of runs.get(branch.index)) {
        if (mod(branch.offset - run.residue, branch.rate) >= run.residues) continue;
        parts.push({ first: run.origin + branch.offset, rate: branch.rate, begin: run.begin, end: run.end });
      }
    }
    return parts;
  }

  // Add the rows of some progressions to the ranks that hold them.
  function shareRows(row, parts, heads, limits) {
    for (let sender = 0; sender < row.length; sender++) {
      const low = limits[sender], high = limits[sender + 1];
      const here = parts.filter(({ begin, end }) => begin < high && end > low);
      if (!here.length) continue;
      row[sender] += heads * countUnion(here.map((p) => ({ ...p, begin: Math.max(p.begin, low), end: Math.min(p.end, high) })));
    }
  }

  // Bytes that ranks receive in a forward: here, by a ring of everything, and by Ulysses' two all-to-alls.
  function summary(state, limits, kv, q) {
    const { ranks, seq_len: numTokens, num_heads: heads, num_kv_heads: kvHeads, head_dim: dim, itemsize } = state;
    const sum = (values) => values.reduce((total, value) => total + value, 0);
    const shards = limits.slice(1).map((end, rank) => end - limits[rank]);
    const bytes = kv.map((row, rank) => (2 * sum(row) + (heads / kvHeads) * sum(q[rank])) * dim * itemsize);
    const ring = shards.map((n) => 2 * (numTokens - n) * kvHeads * dim * itemsize);
    const divides = heads % ranks === 0 && kvHeads % ranks === 0;
    const there = (n) => ((numTokens - n) * (heads + 2 * kvHeads)) / ranks + (n * (ranks - 1) * heads) / ranks;
    return { bytes, ring, ulysses: divides ? shards.map((n) => there(n) * dim * itemsize) : null };
  }

  Object.assign(explorer, { borders, countUnion, neededRows, shareRows, traffic });
})();
