//! Bars around 1, one a line, on one axis for all of them: a picture of wins and losses.
//!
//! The bars are SVG in percent of their box's width, so that they fit any screen; their texts are the page's.
//! The axis is logarithmic and goes from a half to twice; a bar that goes on ends in an arrow, and its figure
//! is beside it.

use std::fmt::Write;

use super::html::escape;
use super::summary::Effect;
use crate::experiment::Row;

/// The axis goes from 1 / `MOST` to `MOST`.
const MOST: f64 = 2.0;
const TICKS: [(f64, &str); 5] = [
    (0.5, "½"),
    (std::f64::consts::FRAC_1_SQRT_2, "0.7"),
    (1.0, "1"),
    (std::f64::consts::SQRT_2, "1.4"),
    (2.0, "2×"),
];

/// Returns where a ratio is, in percent of the width.
fn percent(ratio: f64) -> f64 {
    let share = 0.5 + 0.5 * ratio.ln() / MOST.ln();
    100.0 * share.clamp(0.0, 1.0)
}

pub(super) fn axis() -> String {
    let mut html = String::from("<div class=\"bar axis\"><span></span><span class=\"ticks\">");
    for (ratio, name) in TICKS {
        let _ = write!(html, "<span style=\"left:{:.1}%\">{name}</span>", percent(ratio));
    }
    html += "</span><span></span></div>\n";
    html
}

/// Returns a row's line: its name, the bar with its interval, the figure.
pub(super) fn bar(name: &str, row: &Row) -> String {
    let (effect, gain) = (Effect::of(row).name(), row.gain);
    let (from, to) = (percent(gain.ratio.min(1.0)), percent(gain.ratio.max(1.0)));
    let (low, high) = (percent(gain.low), percent(gain.high));
    let mut svg = String::from("<svg class=\"track\" width=\"100%\" height=\"20\" aria-hidden=\"true\">");
    for (ratio, _) in TICKS {
        let class = if ratio == 1.0 { "one" } else { "grid" };
        let x = percent(ratio);
        let _ = write!(svg, "<line class=\"{class}\" x1=\"{x:.1}%\" x2=\"{x:.1}%\" y1=\"0\" y2=\"20\"/>");
    }
    let _ = write!(
        svg,
        "<rect class=\"full\" x=\"{from:.2}%\" width=\"{:.2}%\" y=\"4\" height=\"12\" rx=\"1\"/><line class=\"whisker\" x1=\"{low:.2}%\" x2=\"{high:.2}%\" y1=\"10\" y2=\"10\"/>",
        (to - from).max(0.3)
    );
    for (is_beyond, x, arrow, anchor) in
        [(gain.ratio > MOST, 99.5, "▶", "end"), (gain.ratio < 1.0 / MOST, 0.5, "◀", "start")]
    {
        if is_beyond {
            let _ = write!(
                svg,
                "<text class=\"arrow\" x=\"{x}%\" y=\"14\" text-anchor=\"{anchor}\">{arrow}</text>"
            );
        }
    }
    format!(
        "<div class=\"bar {effect}\"><span class=\"name\">{}</span>{svg}</svg><span class=\"figure\">{gain:.2}</span></div>\n",
        escape(name)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_axis_is_symmetric_around_one() {
        assert_eq!([0.1, 0.5, 1.0, 2.0, 50.0].map(percent), [0.0, 0.0, 50.0, 100.0, 100.0]);
        assert!((percent(1.25) + percent(0.8) - 100.0).abs() < 1e-9);
    }
}
