// A state in the address, and back: what differs from the defaults, under short names.
"use strict";

(() => {
  const FLAG_OF = new Map([["0", false], ["1", true]]), flag = (text) => FLAG_OF.get(text) ?? text;
  const integer = explorer.parseInteger, list = (text) => (text === "" ? [] : text.split(",").map(integer));
  const KEYS = { // of the state: the name in the address, and what reads its text
    segment_lengths: ["w", list], dilation_rates: ["r", list], window: ["window", integer], global_tokens: ["first", integer], seq_len: ["N", integer],
    num_heads: ["H", integer], num_kv_heads: ["KV", integer], block_size: ["tile", integer], head_dim: ["D", integer], layers: ["layers", integer],
    head: ["head", integer], query: ["query", integer], heads: ["heads", String], offsets: ["offsets", String], view: ["view", String],
    zero_padding: ["zero_padding", flag], detach_weights: ["detach_weights", flag], is_causal: ["causal", flag],
  };

  const start = () => ({ ...structuredClone(explorer.PRESETS.example.state), view: "pairs" });
  const base = () => ({ ...start(), ...explorer.NUMBERS });

  function toAddress(state) {
    const usual = { ...base(), num_kv_heads: state.num_heads, segment_lengths: null, dilation_rates: null };
    const parts = Object.entries(KEYS).filter(([key]) => state[key] !== usual[key]).map(([key, [name]]) =>
      `${name}=${encodeURIComponent(typeof state[key] === "boolean" ? Number(state[key]) : state[key]).replaceAll("%2C", ",")}`);
    return `#${parts.join("&")}`;
  }

  // The state of an address. Wrong values stay in the state: `compute` reports them.
  function fromAddress(address) {
    const given = new URLSearchParams(address.replace(/^#/, ""));
    if (!given.size) return start();
    const state = base();
    for (const [key, [name, read]] of Object.entries(KEYS)) if (given.has(name)) state[key] = read(given.get(name));
    if (!given.has("KV")) state.num_kv_heads = state.num_heads;
    if (!explorer.VIEWS.some(({ id }) => id === state.view)) state.view = "pairs";
    return state;
  }

  Object.assign(explorer, { fromAddress, toAddress });
})();
