// A state in the address, and back: what differs from the defaults, under short names.
"use strict";

(() => {
  const NAMES = { heads: "heads", offsets: "offsets", view: "view" };
  const FLAGS = { zero_padding: "zero_padding", detach_weights: "detach_weights", is_causal: "causal" };
  const BITS = new Map([[false, 0], [true, 1]]), FLAG_OF = new Map([["0", false], ["1", true]]);
  const NUMBERS = {
    window: "window", global_tokens: "first", seq_len: "N", num_heads: "H", num_kv_heads: "KV", block_size: "tile", head_dim: "D",
    layers: "layers", head: "head", query: "query",
  };

  const start = () => ({ ...structuredClone(explorer.PRESETS.example.state), view: "pairs" });
  const base = () => ({ ...start(), ...explorer.NUMBERS });

  function toAddress(state) {
    const usual = { ...base(), num_kv_heads: state.num_heads };
    const parts = [["w", state.segment_lengths.join()], ["r", state.dilation_rates.join()]];
    for (const [key, name] of Object.entries({ ...NUMBERS, ...NAMES })) if (state[key] !== usual[key]) parts.push([name, state[key]]);
    for (const [key, name] of Object.entries(FLAGS)) if (state[key] !== usual[key]) parts.push([name, BITS.get(state[key]) ?? state[key]]);
    return `#${parts.map(([name, value]) => `${name}=${encodeURIComponent(value).replaceAll("%2C", ",")}`).join("&")}`;
  }

  // What an address says. What it says wrongly stays in the state, for `compute` to refuse.
  function fromAddress(address) {
    const given = new URLSearchParams(address.replace(/^#/, ""));
    if (!given.size) return start();
    const state = base();
    const list = (text) => (text === "" ? [] : text.split(",").map(explorer.parseInteger));
    if (given.has("w")) state.segment_lengths = list(given.get("w"));
    if (given.has("r")) state.dilation_rates = list(given.get("r"));
    for (const [key, name] of Object.entries(NUMBERS)) if (given.has(name)) state[key] = explorer.parseInteger(given.get(name));
    if (!given.has("KV")) state.num_kv_heads = state.num_heads;
    for (const [key, name] of Object.entries(NAMES)) if (given.has(name)) state[key] = given.get(name);
    for (const [key, name] of Object.entries(FLAGS)) {
      if (given.has(name)) state[key] = FLAG_OF.get(given.get(name)) ?? given.get(name);
    }
    if (!explorer.VIEWS.some(({ id }) => id === state.view)) state.view = "pairs";
    return state;
  }

  Object.assign(explorer, { fromAddress, toAddress });
})();
