const table = document.getElementById("responses");
const headings = [...table.tHead.rows[0].cells];
headings.forEach((heading, column) => heading.firstElementChild.addEventListener("click", () => {
  const up = heading.getAttribute("aria-sort") === "descending" || (column === 0 && !heading.hasAttribute("aria-sort"));
  headings.forEach(other => other.removeAttribute("aria-sort"));
  heading.setAttribute("aria-sort", up ? "ascending" : "descending");
  const text = row => row.cells[column].dataset.key;  // empty for a response that no reward judges: always last
  const order = (a, b) => up ? text(a) - text(b) : text(b) - text(a);
  const rows = [...table.tBodies[0].rows].sort((a, b) => (text(a) === "") - (text(b) === "") || order(a, b));
  table.tBodies[0].append(...rows);
}));
