"use strict";
(() => {
  const tokens = Array.from(document.querySelectorAll(".token"));
  const tips = JSON.parse(document.getElementById("tips").textContent);
  const tip = document.getElementById("tip");
  const chart = document.getElementById("chart");
  const scroller = document.getElementById("scroller");
  const marker = document.getElementById("marker");
  const column = Number(chart.dataset.column);
  let chosen = -1;

  function show(index) {
    const token = tokens[index];
    tip.replaceChildren();
    for (const [name, value] of tips[index]) {
      const row = document.createElement("div");
      const label = document.createElement("span");
      label.textContent = name + " ";
      const figure = document.createElement("b");
      figure.textContent = value + " ";
      row.append(label, figure);
      tip.append(row);
    }
    tip.hidden = false;
    const box = token.getClientRects()[0] || token.getBoundingClientRect();
    const below = box.bottom + 8 + tip.offsetHeight < window.innerHeight;
    const left = Math.max(8, Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 8));
    tip.style.left = left + window.scrollX + "px";
    tip.style.top = (below ? box.bottom + 8 : box.top - tip.offsetHeight - 8) + window.scrollY + "px";
  }

  function mark(index) {
    marker.setAttribute("x", index * column);
    marker.removeAttribute("visibility");
    scroller.scrollLeft = (index + 0.5) * column - scroller.clientWidth / 2;
  }

  function choose(index) {
    if (chosen >= 0) tokens[chosen].setAttribute("aria-pressed", "false");
    chosen = chosen === index ? -1 : index;
    if (chosen < 0) return marker.setAttribute("visibility", "hidden");
    tokens[index].setAttribute("aria-pressed", "true");
    mark(index);
  }

  function move(index) {
    tokens.forEach((token) => (token.tabIndex = -1));
    tokens[index].tabIndex = 0;
    tokens[index].focus();
  }

  tokens.forEach((token, index) => {
    token.addEventListener("mouseenter", () => show(index));
    token.addEventListener("mouseleave", () => (tip.hidden = true));
    token.addEventListener("focus", () => show(index));
    token.addEventListener("blur", () => (tip.hidden = true));
    token.addEventListener("click", () => choose(index));
    token.addEventListener("keydown", (event) => {
      const last = tokens.length - 1;
      const to = { ArrowRight: Math.min(index + 1, last), ArrowLeft: Math.max(index - 1, 0), Home: 0, End: last };
      if (event.key in to) move(to[event.key]);
      else if (event.key === "Enter" || event.key === " ") choose(index);
      else if (event.key === "Escape") tip.hidden = true;
      else return;
      event.preventDefault();
    });
  });

  chart.addEventListener("click", (event) => {
    const index = Math.floor((event.clientX - chart.getBoundingClientRect().left) / column);
    if (index < 0 || index >= tokens.length) return;
    if (index !== chosen) choose(index);
    tokens[index].scrollIntoView({ block: "nearest" });
    show(index);
  });

  for (const name of ["rejected", "rounds"]) {
    const box = document.getElementById("show-" + name);
    const apply = () => document.getElementById("text").classList.toggle("no-" + name, !box.checked);
    box.addEventListener("change", apply);
    apply();
  }
})();
