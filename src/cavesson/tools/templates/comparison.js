const table = document.getElementById("responses");
const headings = [...table.tHead.rows[0].cells];
headings.forEach((heading, column) => heading.firstElementChild.addEventListener("click", () => {
  const up = heading.getAttribute("aria-sort") === "descending" || (column === 0 && !heading.hasAttribute("aria-sort"));
  headings.forEach(other => other.removeAttribute("aria-sort"));
  heading.setAttribute("aria-sort", up ? "ascending" : "descending");
  const key = row => Number(row.cells[column].dataset.key);
  const rows = [...table.tBodies[0].rows].sort((a, b) => up ? key(a) - key(b) : key(b) - key(a));
  table.tBodies[0].append(...rows);
}));
