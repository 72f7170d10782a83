// The theme's toggles in the navigation have no name that a screen reader could read.
document.addEventListener("DOMContentLoaded", () => {
  for (const toggle of document.querySelectorAll("nav details > summary")) {
    toggle.setAttribute("aria-label", "Show or hide the pages of this section");
  }
});
