// Names the column of each cell of wide tables, for the cards that site.css makes of their rows.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.docutils")) {
    const names = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
    if (names.length < 4) continue;
    table.classList.add("cards");
    for (const row of table.tBodies[0].rows)
      [...row.cells].forEach((cell, i) => (cell.dataset.column = names[i]));
  }
});
