//! The chart of memory by pods, as SVG for light and dark pages.

use std::fmt::Write as _;

use crate::budget::{NODE, Row};
use crate::setup::{BUILTIN, OURS};

/// The drawing, and its margins at the left, right, top and bottom.
const SIZE: (f64, f64) = (800.0, 380.0);
const MARGINS: (f64, f64, f64, f64) = (70.0, 230.0, 50.0, 50.0);

/// Colours by class, for pages of either kind.
const STYLE: &str = "
    .page { fill: #ffffff } .text { fill: #424a53; font-size: 12px }
    .title { fill: #1f2328; font-weight: 600 } .grid { stroke: #d0d7de } .node { stroke: #8c959f }
    .builtin { stroke: #9a6700 } .ours { stroke: #0969da }
    .builtin-name { fill: #9a6700 } .ours-name { fill: #0969da }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117 } .text { fill: #9198a1 } .title { fill: #f0f6fc }
      .grid { stroke: #30363d } .node { stroke: #656c76 }
      .builtin { stroke: #d29922 } .ours { stroke: #58a6ff }
      .builtin-name { fill: #d29922 } .ours-name { fill: #58a6ff }
    }";

/// Returns the memory of all that serves pods, of both controllers, idle and with a container.
pub(crate) fn memory(rows: &[Row]) -> String {
    let most = rows.iter().map(|row| row.pods).max().unwrap_or(1) as f64;
    // Whole gigabytes.
    let top = (rows.iter().map(Row::pss).fold(0.0, f64::max) / 1e6).ceil();
    let scale = Scale { most, top };
    let mut text = String::new();
    for gigabytes in 0..=(top as u32) {
        let y = scale.y(f64::from(gigabytes) * 1e6);
        line(&mut text, "grid", (MARGINS.0, y), (SIZE.0 - MARGINS.1, y));
        label(&mut text, ("text", "end"), (MARGINS.0 - 8.0, y + 4.0), &format!("{gigabytes} GB"));
    }
    for pods in [0, NODE, 250, 500, 1000].into_iter().filter(|pods| *pods as f64 <= most) {
        let (x, bottom) = (scale.x(pods), scale.y(0.0));
        if pods == NODE {
            line(&mut text, "node", (x, MARGINS.2), (x, bottom));
        }
        label(&mut text, ("text", "middle"), (x, bottom + 18.0), &pods.to_string());
    }
    let middle = (MARGINS.0 + SIZE.0 - MARGINS.1) / 2.0;
    label(&mut text, ("text", "middle"), (middle, SIZE.1 - 10.0), "pods of a node");
    for (target, name) in [(BUILTIN, "built-in"), (OURS, "pause-sandboxer")] {
        for with_container in [true, false] {
            let mut points = String::new();
            let mut last = (0.0, 0.0);
            for row in rows {
                if row.target == target && row.with_container == with_container {
                    last = (scale.x(row.pods), scale.y(row.pss()));
                    let _ = write!(points, "{:.1},{:.1} ", last.0, last.1);
                }
            }
            let dash = if with_container { "" } else { " stroke-dasharray=\"5 4\"" };
            let _ = writeln!(
                text,
                "  <polyline class=\"{target}\" fill=\"none\" stroke-width=\"2\"{dash} \
                 points=\"{}\"/>",
                points.trim_end()
            );
            let kind = if with_container { "with a container" } else { "idle" };
            // The lines of both kinds of ours are too near each other for two names.
            let up = if target == OURS && with_container { -10.0 } else { 6.0 };
            let class = format!("{target}-name");
            let words = format!("{name}, {kind}");
            label(&mut text, (&class, "start"), (last.0 + 8.0, last.1 + up), &words);
        }
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" role=\"img\"\n     \
         aria-labelledby=\"title\" font-family=\"system-ui, 'DejaVu Sans', sans-serif\" \
         font-size=\"14\">\n  <title id=\"title\">Memory by pods, with both controllers</title>\n  \
         <style>{STYLE}\n  </style>\n  <rect class=\"page\" width=\"100%\" height=\"100%\"/>\n  \
         <text class=\"title\" x=\"{}\" y=\"26\">Memory of shims, pauses, daemon and containerd's \
         growth</text>\n{text}</svg>\n",
        SIZE.0, SIZE.1, MARGINS.0
    )
}

/// From pods and kilobytes to the drawing.
struct Scale {
    most: f64,
    /// Gigabytes.
    top: f64,
}

impl Scale {
    fn x(&self, pods: usize) -> f64 {
        MARGINS.0 + pods as f64 / self.most * (SIZE.0 - MARGINS.0 - MARGINS.1)
    }

    fn y(&self, kilobytes: f64) -> f64 {
        let height = SIZE.1 - MARGINS.2 - MARGINS.3;
        SIZE.1 - MARGINS.3 - kilobytes / (self.top * 1e6) * height
    }
}

fn line(text: &mut String, class: &str, from: (f64, f64), to: (f64, f64)) {
    let _ = writeln!(
        text,
        "  <line class=\"{class}\" x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\"/>",
        from.0, from.1, to.0, to.1
    );
}

fn label(text: &mut String, (class, anchor): (&str, &str), at: (f64, f64), words: &str) {
    let _ = writeln!(
        text,
        "  <text class=\"{class}\" font-size=\"12\" text-anchor=\"{anchor}\" x=\"{:.1}\" \
         y=\"{:.1}\">{words}</text>",
        at.0, at.1
    );
}
