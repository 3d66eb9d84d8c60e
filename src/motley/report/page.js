"use strict";
const root = document.documentElement;
const hidden = new Set();

function theme() {
  const style = getComputedStyle(root);
  const text = style.getPropertyValue("--text").trim(), line = style.getPropertyValue("--line").trim();
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true };
  const clear = "rgba(0,0,0,0)";
  return { paper_bgcolor: clear, plot_bgcolor: clear, font: { color: text, size: 12 }, xaxis: axis, yaxis: axis };
}

function layout(given) {
  const own = theme();
  return {
    ...given, ...own,
    xaxis: { ...given.xaxis, ...own.xaxis }, yaxis: { ...given.yaxis, ...own.yaxis },
    title: { ...given.title, x: 0.02, xanchor: "left", font: { size: 14 } },
    modebar: { bgcolor: own.paper_bgcolor, color: "#8a949e", activecolor: "#3366cc", orientation: "v" },
    margin: { l: 48, r: 36, t: 44, b: 44 }, hovermode: "x unified", showlegend: false, autosize: true,
  };
}

function draw(figure) {
  if (figure.drawn) return;
  figure.drawn = true;
  const given = JSON.parse(figure.querySelector("script").textContent);
  const heatmap = given.data.some((trace) => trace.type === "heatmap");
  const frame = layout(given.layout);
  if (heatmap) frame.hovermode = "closest";
  frame.showlegend = !heatmap && !given.data.some((trace) => trace.legendgroup);
  const buttons = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["sendChartToCloud"] };
  Plotly.newPlot(figure, given.data, frame, buttons).then(() => toggle(figure));
}

function toggle(figure) {
  if (!figure.data) return;
  const numbers = figure.data.map((trace, number) => number).filter((number) => figure.data[number].legendgroup);
  if (!numbers.length) return;
  const visible = numbers.map((number) => !hidden.has(figure.data[number].legendgroup));
  Plotly.restyle(figure, { visible }, numbers);
}

function repaint() {
  const own = theme();
  for (const figure of document.querySelectorAll("figure")) {
    if (!figure.data) continue;
    const flat = { paper_bgcolor: own.paper_bgcolor, plot_bgcolor: own.plot_bgcolor, "font.color": own.font.color };
    for (const axis of ["xaxis", "yaxis"])
      for (const [key, value] of Object.entries(own[axis])) flat[`${axis}.${key}`] = value;
    Plotly.relayout(figure, flat);
  }
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) draw(entry.target);
}, { rootMargin: "400px" });
document.querySelectorAll("figure").forEach((figure) => seen.observe(figure));

document.querySelectorAll("#series input").forEach((box) => box.addEventListener("change", () => {
  if (box.checked) hidden.delete(box.value); else hidden.add(box.value);
  document.querySelectorAll("figure").forEach(toggle);
}));

document.getElementById("theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  repaint();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

if ("live" in root.dataset) {
  let known = null;
  setInterval(async () => {
    const answer = await fetch("state");
    const state = await answer.text();
    if (known !== null && state !== known) location.reload();
    known = state;
  }, 2000);
}
