// The theme's toggles in the navigation have no name that a screen reader could read.
document.addEventListener("DOMContentLoaded", () => {
  for (const toggle of document.querySelectorAll("nav details > summary")) {
    toggle.setAttribute("aria-label", "Show or hide the pages of this section");
  }
});

// Names in a cell of a table may break between their parts: after a mark, and before a capital.
document.addEventListener("DOMContentLoaded", () => {
  const parts = /(?<=[A-Za-z)][_.,=/(]+|[a-z](?=[A-Z]))(?=[^\s,.;:)])/;
  for (const cell of document.querySelectorAll("td, th")) {
    const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    const texts = [];
    while (walker.nextNode()) texts.push(walker.currentNode);
    for (const text of texts) {
      text.replaceWith(...text.data.split(parts).flatMap((part, i) => (i ? [document.createElement("wbr"), part] : [part])));
    }
  }
});
