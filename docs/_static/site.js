// The theme's toggles in the navigation have no name that a screen reader could read.
document.addEventListener("DOMContentLoaded", () => {
  for (const toggle of document.querySelectorAll("nav details > summary")) {
    toggle.setAttribute("aria-label", "Show or hide the pages of this section");
  }
});

// Names in cells of tables and long ones in the text may break between their parts: after a mark, and before a capital of a long name.
document.addEventListener("DOMContentLoaded", () => {
  const marks = /(?<=[A-Za-z)][_.,=/(]+)(?=[^\s,.;:)]{2})/;
  const parts = /(?<=[A-Za-z)][_.,=/(]+|[a-z](?=[A-Z]))(?=[^\s,.;:)])/;
  for (const name of document.querySelectorAll("article :is(p, li) code .pre")) {
    name.classList.toggle("long", name.textContent.length > 30 && !name.closest("td, th"));
  }
  for (const place of document.querySelectorAll("td, th, .pre.long")) {
    const walker = document.createTreeWalker(place, NodeFilter.SHOW_TEXT);
    const texts = [];
    while (walker.nextNode()) texts.push(walker.currentNode);
    for (const text of texts) {
      const words = text.data.split(/(?<=\s)/).map((word) => word.split(word.trim().length < 12 ? marks : parts));
      const broken = (word) => word.flatMap((part, i) => (i ? [document.createElement("wbr"), part] : [part]));
      text.replaceWith(...words.flatMap(broken));
    }
  }
});
