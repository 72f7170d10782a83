// Everything that the page shows of a state, as plain numbers: one pure function, which the page and the tests call.
"use strict";

(() => {
  const { boundary, countPairs: pairs, lost, reach, reachOf, tiles, uncovered } = explorer;
  const picture = (state) => explorer.picture(explorer.headBranches(state, kvHead(state)), state.seq_len, state.is_causal);
  const query = (state) => explorer.queryKeys(state, explorer.headBranches(state, kvHead(state)));
  const PARTS = { boundary, lost, pairs, picture, query, reach, reachOf, tiles, uncovered };

  // The key/value head of the query head that is looked at.
  const kvHead = (state) => Math.floor(state.head / (state.num_heads / state.num_kv_heads));

  // What is asked of a state; of one that means no legal pattern only `message`, in the library's words.
  function compute(state, parts = Object.keys(PARTS)) {
    const message = explorer.refusal(state);
    if (message) return { message };
    const fits = { ...state, head: clamp(state.head, state.num_heads), query: clamp(state.query, state.seq_len) };
    const found = { message: null, state: fits, python: explorer.python(fits) };
    for (const part of parts) found[part] = PARTS[part](fits);
    return found;
  }

  const clamp = (value, count) => (value < count ? value : count - 1); // a head or query past the end becomes the last one

  Object.assign(explorer, { compute, kvHead });
})();
