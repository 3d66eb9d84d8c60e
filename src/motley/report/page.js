"use strict";
const root = document.documentElement;
const hidden = new Set();
const narrow = matchMedia("(max-width: 40rem)").matches;
const plots = () => document.querySelectorAll(".plot");

function theme() {
  const style = getComputedStyle(root);
  const text = style.getPropertyValue("--text").trim(), line = style.getPropertyValue("--line").trim();
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true };
  const clear = "rgba(0,0,0,0)";
  return { paper_bgcolor: clear, plot_bgcolor: clear, font: { color: text, size: 12 }, xaxis: axis, yaxis: axis };
}

function layout(given) {
  const own = theme();
  const axis = (name) => {
    const title = { ...(given[name] || {}).title, standoff: 8 };
    return { ...given[name], ...own[name], title };
  };
  return {
    ...given, ...own, xaxis: axis("xaxis"), yaxis: axis("yaxis"),
    modebar: { bgcolor: own.paper_bgcolor, color: "#8a949e", activecolor: "#3f75d6" },
    // Room at the top for plotly's buttons, and at the bottom for the axis title.
    margin: { l: 52, r: 16, t: narrow ? 10 : 30, b: 52 },
    hovermode: "x unified", showlegend: false, autosize: true,
    // On a phone a finger on a figure scrolls the page; zooming by dragging would get in its way.
    dragmode: narrow ? false : "zoom",
  };
}

function draw(plot) {
  if (plot.drawn) return;
  plot.drawn = true;
  const given = JSON.parse(plot.querySelector("script").textContent);
  const frame = layout(given.layout);
  if (given.data.some((trace) => trace.type === "heatmap")) frame.hovermode = "closest";
  const buttons = { responsive: true, displaylogo: false, displayModeBar: narrow ? false : "hover" };
  Plotly.newPlot(plot, given.data, frame, buttons).then(() => toggle(plot));
}

function grouped(plot) {
  if (!plot.data) return [];
  return plot.data.map((trace, number) => number).filter((number) => plot.data[number].legendgroup);
}

function toggle(plot) {
  const numbers = grouped(plot);
  if (!numbers.length) return;
  const visible = numbers.map((number) => !hidden.has(plot.data[number].legendgroup));
  Plotly.restyle(plot, { visible }, numbers);
}

// Pointing at a name in the legend fades all other lines.
function emphasize(label) {
  for (const plot of plots()) {
    const numbers = grouped(plot);
    if (!numbers.length) continue;
    const opacity = numbers.map((number) => {
      const trace = plot.data[number];
      const usual = trace.fill === "toself" ? 0.18 : 1;
      return label === null || trace.legendgroup === label ? usual : 0.08 * usual;
    });
    Plotly.restyle(plot, { opacity }, numbers);
  }
}

function repaint() {
  const own = theme();
  for (const plot of plots()) {
    if (!plot.data) continue;
    const flat = { paper_bgcolor: own.paper_bgcolor, plot_bgcolor: own.plot_bgcolor, "font.color": own.font.color };
    for (const axis of ["xaxis", "yaxis"])
      for (const [key, value] of Object.entries(own[axis])) flat[`${axis}.${key}`] = value;
    Plotly.relayout(plot, flat);
  }
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) draw(entry.target);
}, { rootMargin: "400px" });
plots().forEach((plot) => seen.observe(plot));

document.querySelectorAll("#series label").forEach((label) => {
  const box = label.querySelector("input");
  box.addEventListener("change", () => {
    if (box.checked) hidden.delete(box.value); else hidden.add(box.value);
    plots().forEach(toggle);
  });
  if (matchMedia("(hover: hover)").matches) {
    label.addEventListener("mouseenter", () => emphasize(box.value));
    label.addEventListener("mouseleave", () => emphasize(null));
  }
});

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
