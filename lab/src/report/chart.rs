//! A chart as SVG: ratios by number of jobs, on a logarithmic axis around 1, with intervals. Those of a
//! series: for each case the gain, ours beside the published one, then those of the series' steps and of
//! later designs.
//!
//! Colours are those of the page: shapes have the class of their line (`c0` …, in `style.css`) and are drawn
//! in `currentColor`. The picture scales with its box; texts in it are as large as the page's small print
//! when the box is as wide as a phone.

use std::fmt::Write;

use super::html::escape;
use super::summary::Comparison;
use crate::experiment::{LabReport, Series};
use crate::published::Published;

const WIDTH: f64 = 360.0;
const HEIGHT: f64 = 230.0;
const LEFT: f64 = 40.0;
const RIGHT: f64 = 8.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 36.0;
/// The distance of texts on the vertical axis, at least.
const TICK_GAP: f64 = 20.0;
/// The distance of points of different lines at the same number of jobs.
const DODGE: f64 = 7.0;
/// Ratios that the vertical axis may name.
const TICKS: [f64; 33] = [
    0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0, 1.02, 1.05, 1.1, 1.2,
    1.3, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0, 20.0, 50.0, 100.0, 200.0,
];
/// The largest factor beyond a point that the vertical axis shows of its interval, so that one outlier does
/// not flatten all points. An interval that goes on ends at the picture's edge.
const MOST_OF_INTERVAL: f64 = 1.5;
/// The least that the vertical axis spans, in both directions.
const LEAST_SPAN: f64 = 1.06;

pub(super) struct Chart {
    title: String,
    lines: Vec<Line>,
}

struct Line {
    name: String,
    /// The colour: a line of published figures has that of the line that it belongs to.
    colour: usize,
    /// Drawn dashed, with hollow marks.
    is_published: bool,
    points: Vec<Point>,
}

struct Point {
    at: usize,
    ratio: f64,
    interval: Option<(f64, f64)>,
}

impl Chart {
    pub(super) fn to_figure(&self) -> String {
        let (title, picture, legend) = (escape(&self.title), self.to_svg(), self.legend());
        format!("<figure>\n<figcaption>{title}</figcaption>\n{picture}{legend}</figure>\n")
    }

    fn to_svg(&self) -> String {
        let scale = Scale::of(self);
        let mut svg = format!(
            "<svg class=\"chart\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">\n",
            escape(&self.spoken())
        );
        scale.draw_axes(&mut svg);
        for (i, line) in self.lines.iter().enumerate() {
            let shift = (i as f64 - (self.lines.len() - 1) as f64 / 2.0) * scale.dodge;
            line.draw(&mut svg, &scale, shift);
        }
        svg += "</svg>\n";
        svg
    }

    /// Returns what the marks of the lines are, as a list.
    fn legend(&self) -> String {
        let item = |line: &Line| {
            let (colour, mark) = (line.colour, line.mark(8.0, 7.0));
            let dashes = line.dashes();
            format!(
                "<li><svg class=\"key c{colour}\" viewBox=\"0 0 16 14\" aria-hidden=\"true\"><path class=\"line\"{dashes} d=\"M0 7H16\"/>{mark}</svg>{}</li>",
                escape(&line.name)
            )
        };
        format!("<ul class=\"legend\">{}</ul>\n", self.lines.iter().map(item).collect::<String>())
    }

    /// Returns the chart in words, for those who cannot see it.
    fn spoken(&self) -> String {
        let line = |line: &Line| {
            let points = line.points.iter().map(|point| format!("{} at {}", point.text(), point.at));
            format!("{}: {}", line.name, points.collect::<Vec<_>>().join(", "))
        };
        format!("{}. {}", self.title, self.lines.iter().map(line).collect::<Vec<_>>().join("; "))
    }
}

impl Point {
    fn text(&self) -> String {
        match self.interval {
            Some((low, high)) => format!("{:.2} [{low:.2}, {high:.2}]", self.ratio),
            None => format!("{:.2}", self.ratio),
        }
    }
}

impl Line {
    fn draw(&self, svg: &mut String, scale: &Scale, shift: f64) {
        let xy = |point: &Point| (scale.x(point.at) + shift, scale.y(point.ratio));
        let _ = write!(svg, "<g class=\"c{}\">", self.colour);
        let path: Vec<String> = self.points.iter().map(xy).map(|(x, y)| format!("{x:.1} {y:.1}")).collect();
        if path.len() > 1 {
            let _ = write!(svg, "<path class=\"line\"{} d=\"M{}\"/>", self.dashes(), path.join("L"));
        }
        for point in &self.points {
            let (x, y) = xy(point);
            let _ = write!(svg, "<g><title>{}, {}: {}</title>", escape(&self.name), point.at, point.text());
            if let Some((low, high)) = point.interval {
                let (low, high) = (scale.y(low), scale.y(high));
                let _ = write!(svg, "<path class=\"whisker\" d=\"M{x:.1} {low:.1}V{high:.1}\"/>");
            }
            svg.push_str(&self.mark(x, y));
            svg.push_str("</g>");
        }
        svg.push_str("</g>\n");
    }

    fn mark(&self, x: f64, y: f64) -> String {
        match self.is_published {
            true => {
                format!("<path class=\"hollow\" d=\"M{x:.1} {:.1}l4.5 4.5l-4.5 4.5l-4.5 -4.5Z\"/>", y - 4.5)
            }
            false => format!("<circle class=\"full\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\"/>"),
        }
    }

    const fn dashes(&self) -> &'static str {
        if self.is_published { " stroke-dasharray=\"4 3\"" } else { "" }
    }
}

/// Those of the page.
const COLOURS: usize = 6;

pub(super) fn charts(table: &Series, report: &LabReport) -> Vec<Chart> {
    let all = Comparison::all(&(table.designs)());
    let mut cases: Vec<&str> = report.rows.iter().map(|row| row.case.as_str()).collect();
    cases.dedup();
    let (mut main, mut others) = (Vec::new(), Vec::new());
    for case in cases {
        let is_main = |comparison: &&Comparison| {
            let before_at = comparison.before_at;
            before_at == Some(0)
                || before_at.is_some_and(|before| table.all_published(case, before).next().is_some())
        };
        let (of_series, later): (Vec<_>, Vec<_>) = all.iter().partition(is_main);
        main.push(chart(table, report, case, "", &of_series));
        others.push(chart(table, report, case, ": steps and later designs", &later));
    }
    main.append(&mut others);
    main.retain(|chart| !chart.lines.is_empty());
    main
}

fn chart(table: &Series, report: &LabReport, case: &str, what: &str, comparisons: &[&Comparison]) -> Chart {
    let mut lines = Vec::new();
    for (i, comparison) in comparisons.iter().enumerate() {
        let colour = i % COLOURS;
        let rows = comparison.rows(&report.rows).into_iter().filter(|row| row.case == case);
        let points = rows.map(|row| Point {
            at: row.jobs,
            ratio: row.gain.ratio,
            interval: Some((row.gain.low, row.gain.high)),
        });
        let ours = Line { name: comparison.name(), colour, is_published: false, points: points.collect() };
        if ours.points.is_empty() {
            continue;
        }
        lines.push(ours);
        let Some(before_at) = comparison.before_at else { continue };
        let theirs: Vec<_> = table.all_published(case, before_at).collect();
        if let Some((_, first)) = theirs.first() {
            let name = format!("published: {} against {}", first.after.design, first.before.design);
            let point = |(jobs, published): &(usize, Published)| Point {
                at: *jobs,
                ratio: published.ratio,
                interval: None,
            };
            let points = theirs.iter().map(point).collect();
            lines.push(Line { name, colour, is_published: true, points });
        }
    }
    Chart { title: format!("{case}{what}"), lines }
}

struct Scale {
    /// The numbers of jobs, side by side at the same distance.
    across: Vec<usize>,
    /// The logarithms of the lowest and the highest ratio.
    low: f64,
    high: f64,
    dodge: f64,
}

impl Scale {
    fn of(chart: &Chart) -> Scale {
        let points = || chart.lines.iter().flat_map(|line| &line.points);
        let mut across: Vec<usize> = points().map(|point| point.at).collect();
        across.sort_unstable();
        across.dedup();
        let ends = points().flat_map(|point| {
            let (low, high) = point.interval.unwrap_or((point.ratio, point.ratio));
            let (least, most) = (point.ratio / MOST_OF_INTERVAL, point.ratio * MOST_OF_INTERVAL);
            [low.clamp(least, point.ratio), high.clamp(point.ratio, most)]
        });
        let ends = ends.filter(|end| *end > 0.0 && end.is_finite()).chain([LEAST_SPAN, 1.0 / LEAST_SPAN]);
        let (low, high) =
            ends.map(f64::ln).fold((0.0f64, 0.0f64), |(low, high), end| (low.min(end), high.max(end)));
        let margin = 0.05 * (high - low);
        let step = (WIDTH - LEFT - RIGHT) / across.len().max(1) as f64;
        let dodge = DODGE.min(0.8 * step / chart.lines.len().max(1) as f64);
        Scale { across, low: low - margin, high: high + margin, dodge }
    }

    fn x(&self, at: usize) -> f64 {
        let index = self.across.iter().position(|other| *other == at).unwrap_or(0) as f64;
        LEFT + (WIDTH - LEFT - RIGHT) * (index + 0.5) / self.across.len().max(1) as f64
    }

    fn y(&self, ratio: f64) -> f64 {
        let share = ((ratio.ln() - self.low) / (self.high - self.low)).clamp(0.0, 1.0);
        HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
    }

    /// Returns the ratios that the vertical axis names: 1, and others that have room.
    fn ticks(&self) -> Vec<f64> {
        let mut ticks = vec![1.0];
        let inside = TICKS.into_iter().filter(|tick| (self.low..=self.high).contains(&tick.ln()));
        // Round ones first.
        let mut inside: Vec<f64> = inside.collect();
        inside.sort_by_key(|tick| format!("{tick}").len());
        for tick in inside {
            if ticks.iter().all(|other| (self.y(*other) - self.y(tick)).abs() >= TICK_GAP) {
                ticks.push(tick);
            }
        }
        ticks
    }

    fn draw_axes(&self, svg: &mut String) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        let one = self.y(1.0);
        let _ = writeln!(
            svg,
            "<rect class=\"loss\" x=\"{LEFT}\" y=\"{one:.1}\" width=\"{:.1}\" height=\"{:.1}\"/>",
            right - LEFT,
            bottom - one
        );
        for tick in self.ticks() {
            let y = self.y(tick);
            let class = if tick == 1.0 { "one" } else { "grid" };
            let _ = writeln!(
                svg,
                "<path class=\"{class}\" d=\"M{LEFT} {y:.1}H{right}\"/><text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{tick}</text>",
                LEFT - 5.0,
                y + 4.0
            );
        }
        for at in &self.across {
            let _ = writeln!(
                svg,
                "<text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{at}</text>",
                self.x(*at),
                bottom + 15.0
            );
        }
        let _ = writeln!(
            svg,
            "<text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">jobs</text>",
            (LEFT + right) / 2.0,
            HEIGHT - 6.0
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(points: &[(usize, f64, f64, f64)]) -> Chart {
        let point = |(at, ratio, low, high): &(usize, f64, f64, f64)| Point {
            at: *at,
            ratio: *ratio,
            interval: Some((*low, *high)),
        };
        let points = points.iter().map(point).collect();
        let line = Line { name: "a < b".to_owned(), colour: 0, is_published: false, points };
        Chart { title: "t".to_owned(), lines: vec![line] }
    }

    #[test]
    fn gains_are_above_the_line_and_losses_below() {
        let scale = Scale::of(&chart(&[(1, 1.5, 1.4, 1.6), (4, 0.7, 0.6, 0.8)]));
        assert!(scale.y(1.5) < scale.y(1.0) && scale.y(1.0) < scale.y(0.7));
        // A gain of a factor is as far from the line as a loss of that factor.
        assert!((scale.y(1.0) - scale.y(1.5) - (scale.y(1.0 / 1.5) - scale.y(1.0))).abs() < 1e-9);
        assert!(scale.x(1) < scale.x(4) && scale.x(4) < WIDTH - RIGHT);
        for y in [scale.y(1.6), scale.y(0.6)] {
            assert!((TOP..=HEIGHT - BOTTOM).contains(&y), "{y}");
        }
    }

    #[test]
    fn the_axis_names_one_and_few_others() {
        for points in [[(1, 1.0, 1.0, 1.0)], [(1, 1.1, 0.9, 1.3)], [(1, 30.0, 0.2, 90.0)]] {
            let scale = Scale::of(&chart(&points));
            let mut ticks = scale.ticks();
            assert_eq!(ticks[0], 1.0);
            assert!((2..=10).contains(&ticks.len()), "{ticks:?}");
            ticks.sort_by(f64::total_cmp);
            let gaps = ticks.windows(2).map(|pair| scale.y(pair[0]) - scale.y(pair[1]));
            assert!(gaps.into_iter().all(|gap| gap >= TICK_GAP), "{ticks:?}");
        }
    }

    #[test]
    fn names_are_escaped_and_figures_are_told() {
        let svg = chart(&[(1, 1.5, 1.4, 1.6)]).to_svg();
        assert!(svg.contains("a &lt; b, 1: 1.50 [1.40, 1.60]") && !svg.contains("a < b"), "{svg}");
        assert!(chart(&[]).to_svg().contains("jobs"), "a chart without points has axes");
    }
}
