// Draws the figures when they come into view, and handles the legend, the theme and live updates.
"use strict";
const root = document.documentElement;
const hidden = new Set();
const narrow = matchMedia("(max-width: 40rem)").matches;
const plots = () => document.querySelectorAll(".plot");

// The page's colors as a plotly layout.
function theme() {
  const style = getComputedStyle(root);
  const text = style.getPropertyValue("--text").trim();
  const line = style.getPropertyValue("--line").trim();
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true };
  const transparent = "rgba(0,0,0,0)";
  return {
    paper_bgcolor: transparent, plot_bgcolor: transparent, font: { color: text, size: 12 },
    xaxis: axis, yaxis: axis,
  };
}

function layout(base) {
  const colors = theme();
  const axis = (name) => {
    const title = { ...(base[name] || {}).title, standoff: 8 };
    return { ...base[name], ...colors[name], title };
  };
  return {
    ...base, ...colors, xaxis: axis("xaxis"), yaxis: axis("yaxis"),
    modebar: { bgcolor: colors.paper_bgcolor, color: "#8a949e", activecolor: "#3f75d6" },
    // Room at the top for plotly's buttons, and at the bottom for the axis title.
    margin: { l: 52, r: 16, t: narrow ? 10 : 30, b: 52 },
    hovermode: "x unified", showlegend: false, autosize: true,
    // On a phone, dragging scrolls the page, so it must not zoom the figure.
    dragmode: narrow ? false : "zoom",
  };
}

function draw(plot) {
  if (plot.drawn) return;
  plot.drawn = true;
  const figure = JSON.parse(plot.querySelector("script").textContent);
  const themed = layout(figure.layout);
  if (figure.data.some((trace) => trace.type === "heatmap")) themed.hovermode = "closest";
  const modeBar = narrow ? false : "hover";
  const options = { responsive: true, displaylogo: false, displayModeBar: modeBar };
  Plotly.newPlot(plot, figure.data, themed, options).then(() => toggle(plot));
}

// The indices of the traces that belong to a series of the page's legend.
function grouped(plot) {
  if (!plot.data) return [];
  return plot.data.map((trace, number) => number).filter((number) => plot.data[number].legendgroup);
}

// Hide the series that are switched off in the legend.
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

// Apply a changed theme. Plotly's relayout takes dotted keys.
function repaint() {
  const colors = theme();
  for (const plot of plots()) {
    if (!plot.data) continue;
    const changes = {
      paper_bgcolor: colors.paper_bgcolor, plot_bgcolor: colors.plot_bgcolor,
      "font.color": colors.font.color,
    };
    for (const axis of ["xaxis", "yaxis"])
      for (const [key, value] of Object.entries(colors[axis])) changes[`${axis}.${key}`] = value;
    Plotly.relayout(plot, changes);
  }
}

const observer = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) draw(entry.target);
}, { rootMargin: "400px" });
plots().forEach((plot) => observer.observe(plot));

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
  const prefersDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : prefersDark;
  root.dataset.theme = dark ? "light" : "dark";
  repaint();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

// A live page asks its server for changes and reloads itself if there are any.
if ("live" in root.dataset) {
  let lastState = null;
  setInterval(async () => {
    const response = await fetch("state");
    const state = await response.text();
    if (lastState !== null && state !== lastState) location.reload();
    lastState = state;
  }, 2000);
}
