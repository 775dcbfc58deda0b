"""The report page's style sheet; it follows the reader's light or dark mode."""

CSS = """
:root { --paper:#fbfbf9; --card:#fff; --ink:#1b1f24; --soft:#66707c; --line:#e4e5e1; --grid:#eeeeea;
  --ours:#0b7285; --reference:#f0a35e; --band:#c9d3dc; --limit:#c92a2a;
  --good:#2b8a3e; --good-bg:#e6f4e8; --bad:#c92a2a; --bad-bg:#fdeaea;
  --wait:#946200; --wait-bg:#fdf3dc; }
@media (prefers-color-scheme: dark) { :root { --paper:#14171a; --card:#1b1f23; --ink:#e8eaec;
  --soft:#98a2ad; --line:#2c3238; --grid:#252a30; --ours:#4cc3d9; --reference:#c9762a;
  --band:#39444f; --limit:#ff7b72; --good:#6fdb8b; --good-bg:#16321f; --bad:#ff8f88;
  --bad-bg:#3b1a1a; --wait:#f0c05a; --wait-bg:#352a10; } }
* { box-sizing:border-box }
body { margin:0; background:var(--paper); color:var(--ink);
  font:15px/1.55 system-ui, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif }
main { max-width:1040px; margin:0 auto; padding:44px 20px 80px }
header p { color:var(--soft); margin:4px 0 0; max-width:72ch }
h1 { font-size:30px; line-height:1.2; letter-spacing:-.015em; margin:0 }
h2 { font-size:20px; letter-spacing:-.01em; margin:48px 0 4px }
h3 { font-size:15px; margin:24px 0 6px }
.lead { color:var(--soft); margin:0 0 14px; max-width:76ch }
.eyebrow { color:var(--ours); font-size:12px; font-weight:650; letter-spacing:.09em;
  text-transform:uppercase; margin:0 0 8px }
.verdict { display:flex; gap:14px; align-items:center; margin:26px 0 18px; padding:16px 20px;
  border-radius:12px; font-size:17px; font-weight:600 }
.verdict small { display:block; font-size:13.5px; font-weight:400; opacity:.85 }
.verdict .mark { font-size:26px; line-height:1 }
.verdict.pass { background:var(--good-bg); color:var(--good) }
.verdict.fail { background:var(--bad-bg); color:var(--bad) }
.verdict.not { background:var(--wait-bg); color:var(--wait) }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(215px,1fr)); gap:12px }
.tile, .figure, .scroll { background:var(--card); border:1px solid var(--line); border-radius:12px }
.tile { padding:14px 16px 13px }
.tile b { display:block; font-size:25px; font-weight:640; letter-spacing:-.02em; line-height:1.25;
  font-variant-numeric:tabular-nums }
.tile i { font-style:normal; font-size:13px; font-weight:400; color:var(--soft); letter-spacing:0 }
.tile span { color:var(--soft); font-size:13px; line-height:1.4; display:block }
.figure { padding:8px 8px 4px; margin:12px 0 0; position:relative }
.scroll { overflow-x:auto; margin:12px 0 0 }
table { border-collapse:collapse; width:100%; font-size:13.5px; font-variant-numeric:tabular-nums }
th { text-align:left; color:var(--soft); font-weight:550; font-size:12.5px;
  background:var(--paper) }
th, td { padding:7px 12px; border-bottom:1px solid var(--line); white-space:nowrap }
td:first-child { white-space:normal; min-width:110px }
tbody tr:last-child td { border-bottom:0 }
td:not(.number) { white-space:normal }
.number { text-align:right }
.badge { display:inline-block; padding:1px 10px; border-radius:20px; font-size:12px;
  font-weight:650 }
.badge.pass { background:var(--good-bg); color:var(--good) }
.badge.fail { background:var(--bad-bg); color:var(--bad) }
.badge.not { background:var(--wait-bg); color:var(--wait) }
.columns { display:grid; grid-template-columns:repeat(auto-fit,minmax(320px,1fr)); gap:0 20px;
  align-items:start }
footer { margin-top:56px; padding-top:14px; border-top:1px solid var(--line); color:var(--soft);
  font-size:13px; overflow-wrap:anywhere }
svg.panel { display:block; width:100%; height:auto }
svg.end:not(:last-of-type) { margin-bottom:14px }
svg text { fill:var(--soft); font-size:11.5px }
svg text.title { fill:var(--ink); font-size:13.5px; font-weight:620 }
svg text.legend { font-size:12px }
svg text.tick.y { text-anchor:end; dominant-baseline:middle }
svg text.tick.x { text-anchor:middle }
svg text.limit { fill:var(--limit); text-anchor:end }
svg .power { font-size:8.5px }
svg .grid { stroke:var(--grid) } svg .axis { stroke:var(--line) }
svg path, svg line { fill:none }
svg .ours { stroke:var(--ours); stroke-width:1.4; stroke-linejoin:round }
svg .reference { stroke:var(--reference); stroke-width:4; stroke-linejoin:round;
  stroke-linecap:round }
svg .band { stroke:var(--band); stroke-width:2 }
svg .dots { stroke-width:3; stroke-linecap:round }
svg .area { stroke:none; fill:var(--band); fill-opacity:.75 }
svg line.limit { stroke:var(--limit); stroke-dasharray:6 4 }
svg .cursor { stroke:var(--soft); stroke-width:1; visibility:hidden }
.readout { position:absolute; pointer-events:none; display:none; background:var(--ink);
  color:var(--paper); font-size:12px; line-height:1.45; padding:6px 10px; border-radius:8px;
  white-space:pre; z-index:2;
  font-variant-numeric:tabular-nums }
@media print { body { background:#fff } .figure, table { break-inside:avoid } }
"""
