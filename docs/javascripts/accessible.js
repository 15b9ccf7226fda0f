// Mends what the theme leaves out for people who use the keyboard or a screen reader.
const SCROLLS = "pre code, .doc-heading code, .md-typeset__scrollwrap"; // where they are wider than the page

function mend() {
  for (const box of document.querySelectorAll(SCROLLS)) if (!box.hasAttribute("tabindex")) box.tabIndex = 0;
  for (const cell of document.querySelectorAll("th:empty")) cell.replaceWith(document.createElement("td"));
  document.querySelectorAll(".md-code__nav:not([aria-label])").forEach((buttons) => {
    const all = [...document.querySelectorAll("pre")];
    buttons.setAttribute("aria-label", `Buttons of code block ${all.indexOf(buttons.closest("pre")) + 1}`);
  });
}

mend();
// The theme removes the attribute again from a block that fits, and is late when the window gets narrower.
const changes = { childList: true, subtree: true, attributes: true, attributeFilter: ["tabindex"] };
new MutationObserver(mend).observe(document.body, changes);
