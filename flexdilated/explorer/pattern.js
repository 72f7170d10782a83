// A pattern in plain integers: what is refused of it, its offsets, its pairs, its Python. As flexdilated/core/pattern.py says it.
"use strict";
var explorer = window.explorer || {};
window.explorer = explorer;

(() => {
  const HEADS = ["all", "grouped"];
  const OFFSETS = ["blocked", "interleaved"];
  // Beyond these nothing is drawn in time. Positions stay far below 2^53, where numbers stop being integers.
  const LIMITS = { segment_length: 2 ** 40, seq_len: 2 ** 30, num_heads: 128, layers: 64, branches: 12 };

  const ceilDiv = (a, b) => Math.ceil(a / b);
  const mod = (a, b) => ((a % b) + b) % b;

  // How many positions offset, offset + rate, ... lie below length.
  const numKept = (length, rate, offset) => Math.max(0, Math.ceil((length - offset) / rate));

  // -- as Python writes values -------------------------------------------------------------------------------------------------

  function repr(value) {
    if (value === true) return "True";
    if (value === false) return "False";
    if (typeof value !== "string") return String(value);
    const quote = value.includes("'") && !value.includes('"') ? '"' : "'";
    const inner = value.replaceAll("\\", "\\\\").replaceAll("\n", "\\n").replaceAll("\r", "\\r").replaceAll("\t", "\\t");
    return quote + (quote === "'" ? inner.replaceAll("'", "\\'") : inner) + quote;
  }

  const tuple = (values) => `(${values.map(repr).join(", ")}${values.length === 1 ? "," : ""})`;

  const isInteger = (value) => typeof value === "bigint" || Number.isInteger(value);

  // What a field or the address says, as Python's int() would take it, or the text itself.
  function parseInteger(text) {
    const trimmed = String(text).trim();
    if (!/^[+-]?\d+$/.test(trimmed)) return trimmed;
    const number = Number(trimmed);
    return Number.isSafeInteger(number) ? number : BigInt(trimmed);
  }

  // -- what is refused ---------------------------------------------------------------------------------------------------------

  // The library's own message for a pattern that it refuses, and for numbers that do not go with it; else null.
  function refusal(state) {
    const { segment_lengths: lengths, dilation_rates: rates } = state;
    for (const [name, values] of [["segment_lengths", lengths], ["dilation_rates", rates]]) {
      const i = values.findIndex((value) => !isInteger(value));
      if (i >= 0) return `${name}[${i}] must be an integer, got ${repr(values[i])}`;
    }
    const { window } = state;
    if (window !== null && !isInteger(window)) return `window must be an integer, got ${repr(window)}`;
    if (window !== null && window < 1) return `window must be at least 1, got ${window}`;
    const { global_tokens: first } = state;
    if (!isInteger(first)) return `global_tokens must be an integer, got ${repr(first)}`;
    if (first < 0) return `global_tokens must be in [0, ${LIMITS.segment_length}], got ${first}`;
    const hasNear = window !== null || first > 0;
    if (!lengths.length && !hasNear) return "segment_lengths must hold at least one length without a window or global_tokens, got ()";
    if (lengths.length !== rates.length) {
      return `dilation_rates must hold one rate per segment length (${lengths.length}), got ${tuple(rates)}`;
    }
    for (const [i, length] of lengths.entries()) {
      if (length < 1) return `segment_lengths[${i}] must be at least 1, got ${length}`;
      if (rates[i] < 1 || rates[i] > length) {
        return `dilation_rates[${i}] must be in [1, segment_lengths[${i}]=${length}], got ${rates[i]}`;
      }
    }
    if (!HEADS.includes(state.heads)) return `heads must be one of ${tuple(HEADS)}, got ${repr(state.heads)}`;
    if (!OFFSETS.includes(state.offsets)) return `offsets must be one of ${tuple(OFFSETS)}, got ${repr(state.offsets)}`;
    for (const name of ["zero_padding", "detach_weights", "is_causal"]) {
      if (typeof state[name] !== "boolean") return `${name} must be a bool, got ${repr(state[name])}`;
      if (name !== "is_causal" && state[name] && hasNear) {
        return `${name} must be False beside a window or global_tokens, got True: torchscale, whose rule it is, has neither`;
      }
    }
    for (const name of ["num_heads", "seq_len", "num_kv_heads"]) {
      if (!isInteger(state[name])) return `${name} must be an integer, got ${repr(state[name])}`;
      if (state[name] < 1) return `${name} must be at least 1, got ${state[name]}`;
    }
    const { num_heads: heads, num_kv_heads: kvHeads } = state;
    if (BigInt(heads) % BigInt(kvHeads)) return `num_kv_heads must divide num_heads=${heads}, got ${kvHeads}`;
    if (state.heads === "grouped" && kvHeads < lengths.length) {
      return (
        `pattern must have at most one branch per key/value head=${kvHeads} under heads='grouped', got ` +
        `${lengths.length} branches; use more heads, fewer branches or heads='all'`
      );
    }
    return tooLarge(state);
  }

  // What the library takes and this page does not.
  function tooLarge(state) {
    const most = (name, limit, value) => `${name} must be at most ${limit} on this page, got ${value}`;
    if (state.segment_lengths.length > LIMITS.branches) {
      return `pattern must have at most ${LIMITS.branches} branches on this page, got ${state.segment_lengths.length}`;
    }
    for (const [i, length] of state.segment_lengths.entries()) {
      if (length > LIMITS.segment_length) return most(`segment_lengths[${i}]`, LIMITS.segment_length, length);
    }
    for (const name of ["window", "global_tokens"]) if (state[name] > LIMITS.segment_length) return most(name, LIMITS.segment_length, state[name]);
    for (const name of ["num_heads", "seq_len"]) if (state[name] > LIMITS[name]) return most(name, LIMITS[name], state[name]);
    for (const name of ["head", "query"]) {
      if (!isInteger(state[name]) || state[name] < 0) return `${name} must be an integer of at least 0, got ${repr(state[name])}`;
    }
    for (const name of ["layers", "block_size", "head_dim"]) {
      if (!Number.isInteger(state[name]) || state[name] < 1) return `${name} must be an integer of at least 1, got ${repr(state[name])}`;
      if (state[name] > (LIMITS[name] || 2 ** 20)) return most(name, LIMITS[name] || 2 ** 20, state[name]);
    }
    return null;
  }

  // -- what is kept ------------------------------------------------------------------------------------------------------------

  // The branches of segments, and all of them: then the window and the global tokens, segments of rate 1 without end to who looks at offsets alone.
  const branchesOf = (state) => state.segment_lengths.map((length, i) => ({ index: i, length, rate: state.dilation_rates[i] }));

  const allBranchesOf = (state) => [...branchesOf(state),
    ...[{ window: state.window }, { first: state.global_tokens }].filter(({ window, first }) => window || first)
      .map((near, i) => ({ index: state.segment_lengths.length + i, length: Infinity, rate: 1, ...near }))];

  const segmentsOf = (branches) => branches.filter(({ window, first }) => !window && !first);

  // Window and global tokens of a head: their pairs count once, and branches of segments leave them out.
  const nearOf = (branches) => ({ window: branches.find(({ window }) => window)?.window ?? 0, first: branches.find(({ first }) => first)?.first ?? 0 });

  // The least distance, in rows of every rate-th token, of two rows that are no pair of the window.
  const rowsApart = ({ window }, rate) => (window ? Math.floor((window - 1) / rate) + 1 : 0);

  // [first, end) of the key/value heads that run a branch.
  function headRange(state, branch) {
    if (state.heads === "all" || branch >= state.segment_lengths.length) return [0, state.num_kv_heads];
    const count = state.segment_lengths.length;
    const size = Math.floor(state.num_kv_heads / count);
    const larger = state.num_kv_heads % count;
    const start = branch * size + Math.min(branch, larger);
    return [start, start + size + (branch < larger ? 1 : 0)];
  }

  function offset(state, branch, head) {
    if (branch >= state.segment_lengths.length) return 0; // window and global tokens
    const rate = state.dilation_rates[branch];
    if (state.heads === "grouped") return branch % rate;
    if (state.offsets === "interleaved") return head % rate;
    return Math.floor(head / ceilDiv(state.num_kv_heads, rate));
  }

  // The branches that a key/value head runs, each with its offset.
  function headBranches(state, head) {
    return allBranchesOf(state)
      .filter(({ index }) => headRange(state, index)[0] <= head && head < headRange(state, index)[1])
      .map((branch) => ({ ...branch, offset: offset(state, branch.index, head) }));
  }

  // Key/value heads that keep the same in every branch: { heads, branches }.
  function headClasses(state) {
    const found = new Map();
    for (let head = 0; head < state.num_kv_heads; head++) {
      const branches = headBranches(state, head);
      const key = branches.map((branch) => `${branch.index}:${branch.offset}`).join();
      if (!found.has(key)) found.set(key, { heads: [], branches });
      found.get(key).heads.push(head);
    }
    return [...found.values()];
  }

  // -- pairs -------------------------------------------------------------------------------------------------------------------

  // (query, key) pairs that one head of a branch scores. BigInt: they grow with the square of the segment.
  function pairsOfBranch({ length, rate, window, first }, from, numTokens, isCausal, near) {
    const n = BigInt(numTokens), rest = BigInt(Math.max(0, numTokens - near.first)), all = (x) => (isCausal ? (x * (x + 1n)) / 2n : x * x);
    if (first) return all(n) - all(rest);
    if (window) {
      const size = BigInt(Math.min(window, Number(rest))), before = size * rest - (size * (size - 1n)) / 2n;
      return isCausal ? before : 2n * before - rest;
    }
    const w = Math.min(length, numTokens), apart = BigInt(rowsApart(near, rate));
    const scored = (segment, skipped = 0) => {
      const kept = BigInt(numKept(segment, rate, from) - numKept(Math.min(skipped, segment), rate, from)), far = kept > apart ? kept - apart : 0n;
      return isCausal ? (far * (far + 1n)) / 2n : apart ? far * (far + 1n) : kept * kept;
    };
    const begun = Math.floor(near.first / w), whole = Math.floor(numTokens / w), skipped = near.first % w; // segments of global tokens alone; the next may have some
    if (begun > whole) return 0n;
    if (begun === whole) return scored(numTokens % w, skipped);
    return scored(w, skipped) + BigInt(whole - begun - 1) * scored(w) + scored(numTokens % w);
  }

  // Over all key/value heads, a pair that m branches join counted m times: per branch, in all, and those of dense attention.
  function countPairs(state, numTokens = state.seq_len) {
    const near = nearOf(allBranchesOf(state));
    const branches = allBranchesOf(state).map((branch) => {
      const { index } = branch, [first, end] = headRange(state, index);
      let total = 0n;
      const known = new Map();
      for (let head = first; head < end; head++) {
        const from = offset(state, index, head);
        if (!known.has(from)) known.set(from, pairsOfBranch(branch, from, numTokens, state.is_causal, near));
        total += known.get(from);
      }
      return total;
    });
    const n = BigInt(numTokens);
    const dense = BigInt(state.num_kv_heads) * (state.is_causal ? (n * (n + 1n)) / 2n : n * n);
    return { branches, total: branches.reduce((sum, pairs) => sum + pairs, 0n), dense };
  }

  // -- Python ------------------------------------------------------------------------------------------------------------------

  function python(state) {
    const lists = state.segment_lengths.length ? ["segment_lengths", "dilation_rates"] : [];
    const fields = lists.map((name) => `${name}=${tuple(state[name])}`);
    if (state.window !== null) fields.push(`window=${state.window}`);
    if (state.global_tokens) fields.push(`global_tokens=${state.global_tokens}`);
    if (state.heads !== "all") fields.push(`heads="${state.heads}"`);
    if (state.offsets !== "blocked") fields.push(`offsets="${state.offsets}"`);
    for (const name of ["zero_padding", "detach_weights"]) if (state[name]) fields.push(`${name}=True`);
    return `from flexdilated import DilatedPattern\n\npattern = DilatedPattern(${fields.join(", ")})\n`;
  }

  // -- patterns to begin with --------------------------------------------------------------------------------------------------

  const RULES = { window: null, global_tokens: 0, heads: "all", offsets: "blocked", zero_padding: false, detach_weights: false };
  const NUMBERS = { block_size: 128, head_dim: 64, layers: 2, head: 0, query: 0, is_causal: false };
  const TORCHSCALE = { zero_padding: true, detach_weights: true };
  const example = (segment_lengths, dilation_rates, num_heads, seq_len, more = {}) => ({
    ...RULES, ...NUMBERS, segment_lengths, dilation_rates, num_heads, num_kv_heads: num_heads, seq_len, ...more,
  });
  const PRESETS = {
    example: { title: "Small example", state: example([16, 32, 64], [1, 2, 4], 4, 64, { block_size: 16, query: 32 }) },
    causal: {
      title: "Causal",
      state: example([8192], [4], 8, 8192, { window: 256, global_tokens: 4, is_causal: true, query: 5000 }),
    },
    longnet: {
      title: "LongNet",
      state: example([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12], 12, 65536, { is_causal: true, query: 50000 }),
    },
    gigapath: {
      title: "Prov-GigaPath",
      state: example([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16], 16, 16384, { head_dim: 48, query: 5000, ...TORCHSCALE }),
    },
    torchscale: {
      title: "torchscale",
      state: example([2048, 4096], [1, 2], 8, 8192, { query: 3000, is_causal: true, ...TORCHSCALE }),
    },
  };

  Object.assign(explorer, {
    LIMITS, NUMBERS, PRESETS, allBranchesOf, branchesOf, ceilDiv, countPairs, headBranches, headClasses, headRange, mod, nearOf, numKept, offset, pairsOfBranch,
    parseInteger, python, refusal, rowsApart, segmentsOf,
  });
})();
