// Figures name colours ("@blue", "@versions:0.4"); the page gives them the values of its theme and draws again when the theme changes.
const themes = {
  light: {
    ink: "#1b1f24", muted: "#5c6670", rule: "#dde1e6", paper: "#ffffff",
    blue: "#1f6fb2", orange: "#c2570c", green: "#2b8a57", purple: "#8250a8",
    versions: [[0, "#440154"], [0.2, "#46327e"], [0.4, "#365c8d"], [0.6, "#277f8e"], [0.8, "#1fa187"], [1, "#7ac93f"]],
  },
  dark: {
    ink: "#e8eaed", muted: "#9aa4ae", rule: "#33393f", paper: "#14171a",
    blue: "#6cb4f0", orange: "#f2a25c", green: "#66c58f", purple: "#c39be0",
    versions: [[0, "#5a4b9a"], [0.2, "#41729f"], [0.4, "#2d94a0"], [0.6, "#34b38b"], [0.8, "#86d05a"], [1, "#fde725"]],
  },
};
const dark = matchMedia("(prefers-color-scheme: dark)");
const touch = matchMedia("(pointer: coarse)");
const narrow = matchMedia("(max-width: 800px)");

// The colour at `share` (0 to 1) of a scale of [share, "#rrggbb"] stops.
function between(scale, share) {
  const upper = Math.max(1, scale.findIndex(([at]) => at >= share));
  const [[low, from], [high, to]] = [scale[upper - 1], scale[upper]];
  const mix = (i) => {
    const [a, b] = [from, to].map((colour) => parseInt(colour.slice(i, i + 2), 16));
    return Math.round(a + ((b - a) * (share - low)) / (high - low));
  };
  return `rgb(${mix(1)},${mix(3)},${mix(5)})`;
}

function named(colour, theme) {
  const [name, share] = colour.slice(1).split(":");
  return share === undefined ? theme[name] : between(theme[name], Number(share));
}

function painted(value, theme) {
  if (typeof value === "string") return value.startsWith("@") ? named(value, theme) : value;
  if (Array.isArray(value)) return value.map((item) => painted(item, theme));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, painted(item, theme)]));
}

function axis(own, theme) {
  return {
    gridcolor: theme.rule, linecolor: theme.rule, zeroline: false, tickcolor: theme.rule, nticks: narrow.matches ? 5 : 8,
    ...own, title: { ...own.title, font: { size: 12, color: theme.muted } },
  };
}

function draw() {
  const theme = themes[dark.matches ? "dark" : "light"];
  for (const [id, figure] of Object.entries(figures)) {
    const { data, layout } = painted(figure, theme);
    const height = layout.height ?? 296;
    document.getElementById(id).style.height = `${height}px`;
    Plotly.react(id, data, {
      ...layout, height,
      xaxis: axis(layout.xaxis, theme), yaxis: axis(layout.yaxis, theme),
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: theme.ink },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      dragmode: touch.matches ? false : "zoom", // a finger scrolls the page
      margin: { l: 8, r: 8, t: layout.showlegend === false ? 26 : 46, b: 8 },
      legend: { orientation: "h", x: 1, xanchor: "right", y: 1.08, yanchor: "bottom" },
      hoverlabel: { bgcolor: theme.paper, bordercolor: theme.rule, font: { color: theme.ink } },
    }, { responsive: true, displaylogo: false, displayModeBar: false });
  }
}

dark.addEventListener("change", draw);
narrow.addEventListener("change", draw);
draw();
