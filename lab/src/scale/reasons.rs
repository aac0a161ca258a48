//! Why predictions of published figures err, as far as the model can tell.
//!
//! Nothing here changes a prediction: these are sentences about errors that are printed anyway. They rest on three
//! comparisons that take no knowledge of the other machine: the published speed-up with what locks allow at most, with
//! the predicted one, and the error of the design after with that of the design before.

use super::parameters::PublishedParameters;
use super::predict::Band;
use super::published::{FigurePoint, GainPoint, PublishedCase, TOLERATED_PERCENT};

/// A speed-up that exceeds the number of cores by more is called superlinear.
const NOISE: f64 = 1.02;

/// Returns the paragraphs on one machine's figures: those that no model of locks can reach, and why errors exceed
/// [`TOLERATED_PERCENT`].
pub(super) fn paragraphs(case: &PublishedCase, published: &PublishedParameters) -> Vec<String> {
    let figures: Vec<&FigurePoint> =
        case.figures.iter().filter(|point| exceeds(point.error_percent)).collect();
    let gains: Vec<&GainPoint> = case.gains.iter().filter(|point| exceeds(point.error_percent)).collect();
    let mut paragraphs = Vec::new();
    paragraphs.extend(superlinear(&case.figures, case.cores));
    if !figures.is_empty() || !gains.is_empty() {
        paragraphs.extend(too_fast(&figures, case));
        paragraphs.extend(too_slow(&figures, case.cores));
        let (high, low): (Vec<_>, Vec<_>) = gains.into_iter().partition(|point| point.error_percent > 0.0);
        for (how, gains) in [("high", high), ("low", low)] {
            paragraphs.extend(of_gains(how, &gains, !case.figures.is_empty()));
        }
        let crowded = figures.iter().any(|point| point.tasks > case.cores);
        paragraphs.extend(crowded.then(|| {
            format!("More than {} tasks share as many cores here: what a core's second thread adds is not modelled.", case.cores)
        }));
        paragraphs.push(format!("Not in the model: {}", published.not_modelled));
    }
    if !published.fits_one_task {
        paragraphs.push(
            "No figure of one task was published, so that times could not be fitted: inside and outside of locks they are this machine's, and only the gain is compared.".to_owned(),
        );
    }
    paragraphs
}

fn exceeds(error_percent: f64) -> bool {
    error_percent.abs() > TOLERATED_PERCENT
}

/// Returns the least and the most of values, in words.
fn range(values: impl Iterator<Item = f64> + Clone) -> String {
    let least = values.clone().fold(f64::INFINITY, f64::min);
    let most = values.fold(f64::NEG_INFINITY, f64::max);
    if (most - least).abs() < 0.005 { format!("{least:.2}") } else { format!("{least:.2} to {most:.2}") }
}

/// Returns the numbers of tasks of points, each once.
fn tasks<'a>(points: impl Iterator<Item = &'a FigurePoint>) -> String {
    let mut tasks: Vec<usize> = points.map(|point| point.tasks).collect();
    tasks.sort_unstable();
    tasks.dedup();
    tasks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}

/// Returns the published speed-ups that exceed the number of cores.
fn superlinear(points: &[FigurePoint], cores: usize) -> Option<String> {
    let exceeding = |point: &&FigurePoint| {
        point.tasks > 1 && point.published_speedup > NOISE * point.tasks.min(cores) as f64
    };
    let found: Vec<&FigurePoint> = points.iter().filter(exceeding).collect();
    let first = found.iter().min_by_key(|point| point.tasks)?;
    let of_first = found.iter().filter(|point| point.tasks == first.tasks);
    Some(format!(
        "Superlinear with {} tasks: {} tasks did the work of one {} times. No model of locks explains that: waiting for a lock, or for a line, only makes several tasks slower than as many alone. So one task was slow there for another reason, and a prediction from it is too low.",
        tasks(found.iter().copied()),
        first.tasks,
        range(of_first.map(|point| point.published_speedup))
    ))
}

/// Returns a speed that is predicted too high, as a speed-up, whichever way the figure counts.
fn is_too_fast(point: &FigurePoint) -> bool {
    point.predicted_speedup > point.published_speedup
}

fn too_fast(points: &[&FigurePoint], case: &PublishedCase) -> Option<String> {
    let found: Vec<&FigurePoint> = points.iter().copied().filter(|point| is_too_fast(point)).collect();
    let worst = found.iter().max_by(|a, b| {
        let over = |point: &FigurePoint| point.predicted_speedup / point.published_speedup;
        over(a).total_cmp(&over(b))
    })?;
    let lost = 100.0 * (1.0 - worst.published_speedup / worst.tasks.min(case.cores) as f64);
    let mut text = format!(
        "Predicted too fast with {} tasks. The most: {}, {} tasks, which did the work of one {:.2} times, so that {lost:.0} % of what as many cores can do was lost; the model has {:.2} times, and its tasks wait for {:.0} % of their time.",
        tasks(found.iter().copied()),
        worst.published_design,
        worst.tasks,
        worst.published_speedup,
        worst.predicted_speedup,
        100.0 * worst.waiting_share
    );
    if worst.published_speedup < 1.0 {
        text += " Together they did less than one of them alone. Waiting in turn for one lock would leave 1.00: the work itself took longer, as it does when lines move.";
    }
    let beside = case.figures.iter().filter(|point| point.tasks == worst.tasks);
    let all_alike = beside.clone().all(|point| exceeds(point.error_percent) && is_too_fast(point));
    if all_alike && beside.clone().count() > 1 {
        let errors = beside.map(|point| format!("{} {:+.0} %", point.published_design, point.error_percent));
        text += &format!(
            " Every design errs that way ({}), the one after the series included: what is missing is not in what the series changes.",
            errors.collect::<Vec<_>>().join(", ")
        );
    }
    Some(text)
}

fn too_slow(points: &[&FigurePoint], cores: usize) -> Option<String> {
    let is_linear = |point: &&FigurePoint| point.published_speedup <= NOISE * point.tasks.min(cores) as f64;
    let found: Vec<&FigurePoint> =
        points.iter().copied().filter(|point| !is_too_fast(point)).filter(is_linear).collect();
    let worst = found.iter().max_by(|a, b| {
        let under = |point: &FigurePoint| point.published_speedup / point.predicted_speedup;
        under(a).total_cmp(&under(b))
    })?;
    Some(format!(
        "Predicted too slow with {} tasks, though no more than linear. The most: {}, {} tasks, {:.2} times the work of one, predicted {:.2}, with {:.0} % of the time waiting: less of an operation must be inside of locks there than here.",
        tasks(found.iter().copied()),
        worst.published_design,
        worst.tasks,
        worst.published_speedup,
        worst.predicted_speedup,
        100.0 * worst.waiting_share
    ))
}

/// Returns why gains are predicted too high, or too low.
fn of_gains(how: &str, points: &[&GainPoint], is_fitted: bool) -> Option<String> {
    let worst = points.iter().max_by(|a, b| a.error_percent.abs().total_cmp(&b.error_percent.abs()))?;
    let Band { low, middle, high } = worst.predicted;
    let within = if worst.predicted.contains(worst.published) {
        "the published one lies in its band, so the cost of a line on that machine, or the noise of the times here, decides"
    } else if middle < worst.published {
        "what the series removes costs more there than the model's locks and lines do"
    } else {
        "what the series removes costs less there: less of an operation must be inside of these locks than here"
    };
    let fitted = if is_fitted { "" } else { ", with the times of this machine" };
    Some(format!(
        "Gains predicted too {how}. The most: {} over {} with {} tasks is {:.2} as published and {middle:.2} [{low:.2}, {high:.2}] predicted{fitted}: {within}.",
        worst.published_after, worst.published_before, worst.tasks, worst.published
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn published(fits_one_task: bool) -> PublishedParameters {
        PublishedParameters {
            machine: "a machine".to_owned(),
            figure: "elapsed_s".to_owned(),
            heading: "seconds".to_owned(),
            is_time: true,
            units: 1.0,
            why: String::new(),
            jobs: vec![1, 2, 4],
            tasks: Vec::new(),
            fits_one_task,
            not_modelled: "the weather.".to_owned(),
        }
    }

    fn point(tasks: usize, published_speedup: f64, predicted_speedup: f64) -> FigurePoint {
        FigurePoint {
            published_design: "Base",
            design: "split".to_owned(),
            tasks,
            published: 1.0,
            predicted: Band::of(&[1.0]),
            error_percent: 100.0 * (published_speedup / predicted_speedup - 1.0),
            published_speedup,
            predicted_speedup,
            waiting_share: 0.25,
        }
    }

    fn said(figures: Vec<FigurePoint>, gains: Vec<GainPoint>, fits: bool) -> String {
        let case = PublishedCase {
            case: "a case".to_owned(),
            machine: "a machine".to_owned(),
            cores: 4,
            figure: "elapsed_s".to_owned(),
            heading: "seconds".to_owned(),
            figures,
            gains,
            reasons: Vec::new(),
        };
        paragraphs(&case, &published(fits)).join("\n")
    }

    #[test]
    fn small_errors_need_no_reasons() {
        assert_eq!(said(vec![point(1, 1.0, 1.0), point(2, 1.9, 2.0)], Vec::new(), true), "");
    }

    #[test]
    fn each_kind_of_error_has_its_sentence() {
        let text = said(vec![point(2, 3.2, 2.0), point(4, 3.9, 4.0)], Vec::new(), true);
        assert!(text.contains("Superlinear with 2 tasks: 2 tasks did the work of one 3.20 times."), "{text}");
        let text = said(vec![point(2, 1.8, 2.0), point(4, 0.8, 3.9)], Vec::new(), true);
        assert!(text.contains("too fast with 4 tasks. The most: Base, 4 tasks, which did the work of one 0.80 times, so that 80 %"), "{text}");
        assert!(
            text.contains("3.90 times, and its tasks wait for 25 %") && text.contains("would leave 1.00"),
            "{text}"
        );
        assert!(text.ends_with("Not in the model: the weather."), "{text}");
        let text = said(vec![point(8, 3.0, 2.0)], Vec::new(), true);
        assert!(text.contains("too slow with 8 tasks") && text.contains("More than 4 tasks share"), "{text}");
    }

    fn gain(published: f64, predicted: [f64; 3]) -> GainPoint {
        GainPoint {
            published_before: "baseline",
            published_after: "RFC",
            before: "eager".to_owned(),
            after: "delayed".to_owned(),
            tasks: 128,
            published,
            predicted: Band::of(&predicted),
            error_percent: 100.0 * (predicted[0] / published - 1.0),
        }
    }

    #[test]
    fn gains_are_told_with_their_bands() {
        let text = said(Vec::new(), vec![gain(1.13, [1.5, 1.1, 1.6])], false);
        assert!(text.contains("RFC over baseline with 128 tasks is 1.13 as published and 1.50 [1.10, 1.60] predicted, with the times of this machine: the published one lies in its band"), "{text}");
        assert!(text.contains("No figure of one task was published"), "{text}");
    }

    #[test]
    fn gains_too_high_and_too_low_have_a_sentence_each() {
        let gains = vec![gain(1.0, [1.2; 3]), gain(1.0, [1.5; 3]), gain(2.0, [1.4; 3]), gain(1.0, [1.1; 3])];
        let text = said(vec![point(1, 1.0, 1.0)], gains, true);
        assert_eq!(text.matches("Gains predicted").count(), 2, "{text}");
        for said in [
            "Gains predicted too high. The most: RFC over baseline with 128 tasks is 1.00 as published and 1.50 [1.50, 1.50] predicted: what the series removes costs less there",
            "Gains predicted too low. The most: RFC over baseline with 128 tasks is 2.00 as published and 1.40 [1.40, 1.40] predicted: what the series removes costs more there",
        ] {
            assert!(text.contains(said), "{text}");
        }
    }
}
