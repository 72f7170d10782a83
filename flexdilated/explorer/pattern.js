// A pattern in plain integers: its errors, its offsets, its Python. As in flexdilated/core/pattern.py.
"use strict";
var explorer = window.explorer || {};
window.explorer = explorer;

(() => {
  const HEADS = ["all", "grouped"];
  const OFFSETS = ["blocked", "interleaved"];
  // Larger patterns would take too long to draw. Positions stay far below 2^53, up to which integers are exact.
  const LIMITS = { segment_length: 2 ** 40, window: 2 ** 40, global_tokens: 2 ** 40, seq_len: 2 ** 30, num_heads: 128, layers: 64, branches: 12 };

  const ceilDiv = (a, b) => Math.ceil(a / b);
  const mod = (a, b) => ((a % b) + b) % b;

  // How many positions offset, offset + rate, ... are below length.
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

  // -- errors ------------------------------------------------------------------------------------------------------------------

  // The library's own message for a wrong pattern, and for numbers that do not fit the pattern; else null.
  function refusal(state) {
    const { segment_lengths: lengths, dilation_rates: rates } = state;
    for (const [name, values] of [["segment_lengths", lengths], ["dilation_rates", rates]]) {
      const i = values.findIndex((value) => !isInteger(value));
      if (i >= 0) return `${name}[${i}] must be an integer, got ${repr(values[i])}`;
    }
    const integer = (name, least, range = `at least ${least}`) => !isInteger(state[name]) ? `${name} must be an integer, got ${repr(state[name])}`
      : state[name] < least ? `${name} must be ${range}, got ${state[name]}` : null;
    const near = (state.window === null ? null : integer("window", 1)) ?? integer("global_tokens", 0, `in [0, ${LIMITS.global_tokens}]`);
    if (near) return near;
    const hasNear = state.window !== null || state.global_tokens > 0;
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
    const size = integer("num_heads", 1) ?? integer("seq_len", 1) ?? integer("num_kv_heads", 1);
    if (size) return size;
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
    for (const name of ["window", "global_tokens", "num_heads", "seq_len"]) if (state[name] > LIMITS[name]) return most(name, LIMITS[name], state[name]);
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

  // The branches of segments, then the window and the first tokens, each as one segment of rate 1 that is longer than every sequence.
  function allBranchesOf(state) {
    const segments = state.segment_lengths.map((length, index) => ({ index, length, rate: state.dilation_rates[index] }));
    const near = [{ window: state.window }, { first: state.global_tokens }].filter(({ window, first }) => window || first);
    return [...segments, ...near.map((kind, i) => ({ index: segments.length + i, length: LIMITS.segment_length, rate: 1, ...kind }))];
  }

  const isNear = ({ window, first }) => window || first;
  const segmentsOf = (branches) => branches.filter((branch) => !isNear(branch));

  // Window and first tokens of a head: their pairs count once, and branches of segments leave them out.
  const nearOf = (branches) => ({ window: branches.find(({ window }) => window)?.window ?? 0, first: branches.find(({ first }) => first)?.first ?? 0 });

  // The offset of a key/value head in a branch; null where the head does not run it.
  function offset(state, branch, head) {
    const rate = state.dilation_rates[branch], count = state.segment_lengths.length, { num_kv_heads: heads } = state;
    if (branch >= count) return 0;
    if (state.heads === "grouped") {
      const size = Math.floor(heads / count), larger = heads % count, start = branch * size + Math.min(branch, larger);
      return start <= head && head < start + size + (branch < larger ? 1 : 0) ? branch % rate : null;
    }
    return state.offsets === "interleaved" ? head % rate : Math.floor(head / ceilDiv(heads, rate));
  }

  // The offsets of a branch, each with the number of its key/value heads.
  function offsetsOf(state, branch) {
    const found = new Map();
    for (let head = 0; head < state.num_kv_heads; head++) {
      const from = offset(state, branch, head);
      if (from !== null) found.set(from, (found.get(from) ?? 0) + 1);
    }
    return found;
  }

  // The branches that a key/value head runs, each with its offset.
  const headBranches = (state, head) => allBranchesOf(state)
    .map((branch) => ({ ...branch, offset: offset(state, branch.index, head) })).filter((branch) => branch.offset !== null);

  // Key/value heads that keep the same in every branch: { heads, branches }.
  function headClasses(state) {
    const found = new Map();
    for (let head = 0; head < state.num_kv_heads; head++) {
      const branches = headBranches(state, head);
      const key = branches.map(({ index, offset: from }) => `${index}:${from}`).join();
      if (!found.has(key)) found.set(key, { heads: [], branches });
      found.get(key).heads.push(head);
    }
    return [...found.values()];
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
    LIMITS, NUMBERS, PRESETS, allBranchesOf, ceilDiv, headBranches, headClasses, isNear, mod, nearOf, numKept, offset, offsetsOf, parseInteger,
    python, refusal, segmentsOf,
  });
})();
