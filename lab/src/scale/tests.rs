#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use super::costs::Costs;
use super::measured::{Level, Pick, elsewhere, here};
use super::model::{Lock, Machine, Model, Section, Service, Sleep, Spread};
use super::mva::{bounds, throughput};
use super::parameters::Amount;
use super::simulate::{Outcome, simulate};
use super::*;
use crate::experiment::testing::{row, side};
use crate::experiment::{Designs, TABLES, Values};

const OPERATIONS: usize = 8000;

fn section(lock: Option<usize>, visits: f64, ns: f64) -> Section {
    Section { name: String::new(), lock, visits, ns, lines: 0.0, bulk_lines: 0.0 }
}

fn model(spreads: &[Spread], sections: Vec<Section>) -> Model {
    let lock = |spread: &Spread| Lock { name: String::new(), spread: *spread };
    Model { locks: spreads.iter().map(lock).collect(), sections }
}

/// Returns a model of `inside_ns` under one lock and `outside_ns` outside.
fn one_lock(inside_ns: f64, outside_ns: f64) -> Model {
    model(&[Spread::One], vec![section(Some(0), 1.0, inside_ns), section(None, 1.0, outside_ns)])
}

fn run(model: &Model, machine: &Machine, cores: usize) -> Outcome {
    simulate(model, machine, cores, 7, OPERATIONS).unwrap()
}

const DETERMINISTIC: Machine = Machine::ideal(Service::Deterministic);
const EXPONENTIAL: Machine = Machine::ideal(Service::Exponential);

fn assert_near(found: f64, wanted: f64, tolerance: f64, what: &str) {
    assert!((found / wanted - 1.0).abs() <= tolerance, "{what}: {found} instead of {wanted}");
}

#[test]
fn one_core_takes_the_sum_of_the_parts() {
    let sections =
        vec![section(Some(0), 2.0, 30.0), section(None, 1.0, 100.0), section(Some(1), 0.25, 160.0)];
    let model = model(&[Spread::One, Spread::Random(5)], sections);
    assert_eq!(model.alone_ns(), 200.0);
    for (machine, tolerance) in [(DETERMINISTIC, 0.01), (EXPONENTIAL, 0.03)] {
        let outcome = run(&model, &machine, 1);
        assert_near(outcome.per_s, 5e6, tolerance, "operations a second");
        assert!(outcome.waits.iter().all(|waits| waits.waited == 0) && outcome.waiting_share == 0.0);
    }
    assert_near(throughput(&model, 1, 1), 5e6, 1e-12, "the closed form");
}

#[test]
fn without_locks_it_scales_with_the_cores() {
    let model = model(&[], vec![section(None, 1.0, 70.0), section(None, 0.5, 60.0)]);
    for cores in [1, 3, 16] {
        assert_near(run(&model, &EXPONENTIAL, cores).per_s, 1e7 * cores as f64, 0.03, "simulated");
        assert_near(throughput(&model, cores, 1), 1e7 * cores as f64, 1e-12, "the closed form");
    }
}

#[test]
fn a_saturated_lock_gives_one_operation_each_hold() {
    let model = one_lock(50.0, 200.0);
    for machine in [DETERMINISTIC, EXPONENTIAL] {
        let outcome = run(&model, &machine, 64);
        assert_near(outcome.per_s, 2e7, 0.03, "operations a second");
        // 64 cores, of which as many as 5 are busy.
        assert_near(outcome.waiting_share, 59.0 / 64.0, 0.02, "waiting");
    }
    assert_near(throughput(&model, 64, 1), 2e7, 0.001, "the closed form");
}

/// For exponential times the closed form is exact.
#[test]
fn simulation_and_closed_form_agree() {
    let models = [
        one_lock(50.0, 200.0),
        model(
            &[Spread::One, Spread::Random(8), Spread::Stack],
            vec![
                section(Some(0), 1.0, 20.0),
                section(Some(1), 1.0, 120.0),
                section(Some(2), 1.0, 40.0),
                section(Some(0), 0.5, 20.0),
                section(None, 1.0, 100.0),
            ],
        ),
        model(&[Spread::PerNode], vec![section(Some(0), 1.0, 30.0), section(None, 1.0, 150.0)]),
    ];
    let machine = Machine { nodes: 2, ..EXPONENTIAL };
    for (at, model) in models.iter().enumerate() {
        for cores in [1, 2, 4, 7, 12, 24] {
            let simulated = simulate(model, &machine, cores, 7, 4 * OPERATIONS).unwrap().per_s;
            let exact = throughput(model, cores, machine.nodes);
            assert_near(simulated, exact, 0.03, &format!("model {at}, {cores} cores"));
            let (least, most) = bounds(model, cores, machine.nodes);
            assert!((least * 0.999..=most * 1.001).contains(&exact), "model {at}: {least} {exact} {most}");
        }
    }
}

/// With one lock and times that do not vary, cores fall into step: nobody waits until the lock is saturated.
#[test]
fn times_that_do_not_vary_reach_the_bound() {
    let model = one_lock(50.0, 200.0);
    for cores in [1, 2, 4, 5, 8, 32] {
        let simulated = run(&model, &DETERMINISTIC, cores).per_s;
        let (least, most) = bounds(&model, cores, 1);
        assert_near(simulated, most, 0.01, &format!("{cores} cores"));
        assert!(simulated >= least);
    }
}

#[test]
fn a_line_moves_only_from_another_core() {
    let mut model = one_lock(50.0, 0.0);
    model.sections[0].lines = 2.0;
    model.sections[0].bulk_lines = 10.0;
    let machine = Machine { line_ns: 20.0, bulk_line_ns: 1.0, ..DETERMINISTIC };
    assert_near(run(&model, &machine, 1).per_s, 2e7, 0.001, "one core");
    // The queue hands the lock over to the other core each time.
    assert_near(run(&model, &machine, 2).per_s, 1e7, 0.001, "two cores");
    let mut outside = self::model(&[], vec![section(None, 1.0, 50.0)]);
    outside.sections[0].lines = 1.0;
    assert_near(run(&outside, &machine, 1).per_s, 2e7, 0.001, "outside, one core");
    assert_near(run(&outside, &machine, 2).per_s, 2e9 / 70.0, 0.001, "outside, two cores");
}

#[test]
fn spinning_waiters_delay_the_hand_over() {
    let machine = Machine { spin_ns_per_waiter: 10.0, ..DETERMINISTIC };
    // One holds the lock, one gets it, and six spin.
    assert_near(run(&one_lock(40.0, 0.0), &machine, 8).per_s, 1e7, 0.01, "eight cores");
}

#[test]
fn sleeping_waiters_are_woken() {
    let sleep = Sleep { after_ns: 100.0, wake_ns: 5000.0, call_ns: 500.0 };
    let sleepy = Machine { sleep: Some(sleep), ..EXPONENTIAL };
    let model = one_lock(100.0, 300.0);
    for cores in [1, 2, 4, 32] {
        let (slept, spun) = (run(&model, &sleepy, cores), run(&model, &EXPONENTIAL, cores));
        assert!(slept.per_s <= 1.02 * spun.per_s, "{cores} cores: {} {}", slept.per_s, spun.per_s);
        // The holder goes on, whoever sleeps.
        let call_ns = if cores > 1 { 500.0 } else { 0.0 };
        assert!(slept.per_s >= 0.95e9 / (400.0 + call_ns), "{cores} cores: {}", slept.per_s);
    }
}

#[test]
fn a_stack_hands_out_what_was_returned_last() {
    let mut model = model(&[Spread::Stack], vec![section(Some(0), 1.0, 100.0), section(None, 1.0, 100.0)]);
    model.sections[0].bulk_lines = 50.0;
    let machine = Machine { bulk_line_ns: 1.0, ..EXPONENTIAL };
    assert_near(run(&model, &machine, 1).per_s, 5e6, 0.03, "one core");
    let eight = run(&model, &machine, 8);
    assert!(eight.waits[0].waited == 0 && eight.per_s < 0.9 * 8.0 * 5e6 && eight.per_s > 0.78 * 8.0 * 5e6);
    // If the next operation begins as soon as one ends, a core's stream is still on top.
    model.sections[1].ns = 0.0;
    assert_near(run(&model, &machine, 8).per_s, 8e7, 0.03, "eight cores that take it at once");
}

#[test]
fn each_node_has_its_lock() {
    let model = model(&[Spread::PerNode], vec![section(Some(0), 1.0, 50.0), section(None, 1.0, 50.0)]);
    for (nodes, wanted) in [(1, 2e7), (2, 4e7), (4, 8e7)] {
        let machine = Machine { nodes, ..EXPONENTIAL };
        assert_near(run(&model, &machine, 64).per_s, wanted, 0.03, "operations a second");
        assert_near(throughput(&model, 64, nodes), wanted, 0.001, "the closed form");
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let model = one_lock(50.0, 100.0);
    let machine = Machine { line_ns: 20.0, ..EXPONENTIAL };
    let of_seed = |seed| simulate(&model, &machine, 5, seed, OPERATIONS).unwrap();
    assert_eq!(of_seed(3), of_seed(3));
    assert_ne!(of_seed(3), of_seed(4));
}

#[test]
fn what_cannot_be_simulated_is_refused() {
    for broken in [
        model(&[], vec![section(None, 1.0, 0.0)]),
        model(&[], vec![section(Some(0), 1.0, 1.0)]),
        model(&[], vec![section(None, 1.0, f64::NAN)]),
        model(&[], Vec::new()),
    ] {
        assert!(simulate(&broken, &EXPONENTIAL, 2, 1, 10).is_err());
    }
}

#[test]
fn numbers_of_cores_are_listed_or_double() {
    assert_eq!(parse_cores("1..128").unwrap(), [1, 2, 4, 8, 16, 32, 64, 128]);
    assert_eq!(parse_cores("3..20").unwrap(), [3, 6, 12, 20]);
    assert_eq!(parse_cores("5..5").unwrap(), [5]);
    assert_eq!(parse_cores("8, 1,8").unwrap(), [1, 8]);
    for bad in ["", "0", "1..", "4..2", "1..99999", "x"] {
        assert!(parse_cores(bad).err().unwrap().to_string().contains("--cores"), "{bad}");
    }
}

fn costs() -> Costs {
    Costs {
        line_ns: vec![40.0, 60.0, 50.0],
        bulk_line_ns: vec![5.0; 3],
        clock_ns: vec![20.0; 3],
        spin_ns: vec![1000.0; 3],
        wake_ns: vec![5000.0; 3],
        wake_call_ns: vec![800.0; 3],
        stream_list_ns: vec![15.0; 3],
        compress_ns: vec![5000.0; 3],
    }
}

/// Returns a value of every quantity that the parameters name, and two others of rounds.
fn values(workload: &CaseParameters) -> Values {
    let mut values: Values = BTreeMap::from([("elapsed_s", vec![0.1; 3])]);
    let mut add = |amount: &Amount| match amount {
        Amount::Quantity(name) | Amount::Part { of: name, .. } => {
            let name: &'static str = name.clone().leak();
            let value = if name.contains("ns_per") { 60.0 } else { 0.5 };
            values.insert(name, vec![value, 1.1 * value, 0.9 * value]);
        }
        Amount::Number(_) => {}
    };
    for section in workload.designs.iter().flat_map(|design| &design.sections) {
        [&section.visits, &section.ns, &section.lines, &section.bulk_lines].into_iter().for_each(&mut add);
    }
    workload.locks.iter().for_each(|lock| add(&lock.count));
    let time: &'static str = workload.time.clone().leak();
    values.insert(time, vec![500.0, 520.0, 480.0]);
    values
}

/// The times of the sections add up to that of the operation, whatever the structure.
#[test]
fn models_take_as_long_as_was_measured() {
    let parameters = Parameters::built_in().unwrap();
    let costs = costs();
    for workload in &parameters.tables {
        let values = values(workload);
        let measured = Measured { values: &values, costs: &costs };
        for sections in workload.designs.iter().map(|design| &design.sections) {
            for pick in [Pick::Median, Pick::Round(1)] {
                let model = measured.model(workload, sections, pick).unwrap();
                let wanted = workload.units_per_operation * measured.unit_ns(workload, pick).unwrap();
                let what = format!("{} {:?}", workload.table, workload.cases);
                // A hold that reading the clock explains takes nothing.
                assert_near(model.alone_ns(), wanted, 1e-9, &what);
                let variants = Variants::here(&parameters, workload, sections, measured).unwrap();
                let one = variants.without_lines(1);
                let unit_ns = measured.unit_ns(workload, Pick::Median).unwrap();
                assert_near(one, 1e9 / unit_ns, 1e-9, &what);
            }
        }
    }
}

/// Every table, case, design, machine and row that the parameters name exists.
#[test]
fn the_parameters_fit_the_tables() {
    let parameters = Parameters::built_in().unwrap();
    for workload in &parameters.tables {
        let table = TABLES.into_iter().find(|table| table.name == workload.table).unwrap();
        let designs = (table.designs)();
        let modelled = |names: &[String]| -> Vec<String> {
            names.iter().map(|name| modelled_as(name, cpus())).collect()
        };
        for name in workload.designs.iter().flat_map(|design| &design.names) {
            assert!(modelled(&designs.all()).contains(name), "{}: {name}", table.name);
        }
        let compared = [designs.before.as_slice(), &[designs.after]].concat();
        assert!(modelled(&compared).iter().all(|name| workload.sections(name).is_some()));
        assert!(workload.cases.iter().all(|case| table.case_names().contains(&case.as_str())));
        for published in &workload.published {
            parameters.machine(&published.machine).unwrap();
            assert_eq!(published.points().count(), published.jobs.len());
            assert_eq!(published.points().any(|(_, tasks)| tasks == 1), published.fits_one_task);
            for (case, (jobs, _)) in
                workload.cases.iter().flat_map(|case| published.points().map(move |at| (case, at)))
            {
                let row = (table.published)(case, jobs, 0).unwrap();
                for side in [row.before, row.after] {
                    assert!(side.values[published.figure.as_str()] > 0.0, "{case}, {jobs}");
                }
            }
        }
        for section in workload.designs.iter().flat_map(|design| &design.sections) {
            let is_lock = |name: &String| workload.locks.iter().any(|lock| lock.name == *name);
            assert!(section.lock.as_ref().is_none_or(is_lock), "{}: {}", table.name, section.name);
        }
    }
    assert!(parameters.of_table("unmap").err().unwrap().to_string().contains("zs-free, streams"));
}

/// No number stands in the parameters without a reason.
#[test]
fn the_parameters_have_their_reasons() {
    let parameters = Parameters::built_in().unwrap();
    let machines = parameters.machines.iter().flat_map(|machine| [&machine.why, &machine.line_source]);
    let published = parameters.tables.iter().flat_map(|workload| &workload.published);
    let published = published.flat_map(|figures| [&figures.why, &figures.not_modelled, &figures.heading]);
    let workloads = parameters.tables.iter().map(|workload| &workload.why);
    for why in [&parameters.why].into_iter().chain(machines).chain(published).chain(workloads) {
        assert!(!why.trim().is_empty());
    }
}

#[test]
fn lists_of_streams_are_called_by_those_of_a_core() {
    let names = |cpus: usize| [cpus, 2 * cpus].map(|streams| modelled_as(&streams.to_string(), cpus));
    for cpus in [1, 2, 4, 96] {
        assert_eq!(names(cpus), ["list of 1 stream per core", "list of 2 streams per core"]);
    }
    assert_eq!(modelled_as("percpu", 4), "percpu");
}

/// Returns predictions for a case of `streams` from made-up rows with these numbers of jobs.
fn predicted_streams(jobs: &[usize]) -> ScaleReport {
    const CASE: &str = "write";
    let table = experiment::table("streams").unwrap();
    let Designs { before, after, .. } = (table.designs)();
    let mut rows = Vec::new();
    for jobs in jobs {
        let of = |design: &str| side(design, &[("elapsed_s", 0.1), ("mb_per_s", 400.0 * *jobs as f64)]);
        rows.extend(before.iter().map(|before| row(table, CASE, *jobs, of(before), of(&after))));
    }
    let lab = LabOptions { cases: vec![CASE.to_owned()], ..LabOptions::default() };
    let measured = LabReport::new(table, &lab, rows, Vec::new());
    let options = ScaleOptions { lab, cores: vec![1, 8], operations: Some(300) };
    predict_from(table, &options, costs(), &measured).unwrap()
}

/// What is predicted for other numbers of cores is not called by the size that it has here, and what was published is
/// called as its author did.
#[test]
fn predictions_and_published_figures_have_their_own_names() {
    let report = predicted_streams(&[1, 2]);
    let models = ["list of 1 stream per core", "list of 2 streams per core", "percpu"];
    let curves: Vec<&str> = report.curves.iter().map(|curve| curve.design.as_str()).collect();
    let checks: Vec<&str> = report.checks.iter().map(|check| check.design.as_str()).collect();
    assert_eq!((curves.as_slice(), checks.as_slice()), (&models[..], &models[..]));
    let [case] = report.published.as_slice() else { panic!("{:?}", report.published) };
    let mut named: Vec<_> =
        case.figures.iter().map(|point| (point.published_design, point.design.as_str())).collect();
    named.dedup();
    assert_eq!(named, [("4 streams", models[0]), ("8 streams", models[1]), ("per-cpu", models[2])]);
    for [name, design] in report::figures_table(case).rows().iter().map(|cells| [&cells[0], &cells[1]]) {
        assert!(named.contains(&(name.as_str(), design.as_str())), "{name}: {design}");
    }
    for cells in report::gains_table(case).rows() {
        assert!(
            cells[0] == "per-cpu" && ["4 streams", "8 streams"].contains(&cells[1].as_str()),
            "{cells:?}"
        );
    }
    let first = &report.sentences()[0];
    assert!(first.starts_with("With 8 cores, predicted: write: list of 2 streams per core "), "{first}");
    assert!(first.ends_with(" times as fast as list of 1 stream per core."), "{first}");
}

/// What is said of the rounds is true with one number of jobs, and with two.
#[test]
fn a_report_says_what_was_measured() {
    for (jobs, checks) in [(&[1][..], 0), (&[1, 2], 3)] {
        let report = predicted_streams(jobs);
        assert_eq!(report.checks.len(), checks);
        let said = report.sentences().iter().any(|said| said.contains("speeds that were measured here "));
        assert_eq!(said, checks > 0);
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let text = words(&report.to_string());
        for said in ["rounds with 1 job;".to_owned(), words(&report::legend()), words(&report.parameters.why)]
        {
            assert!(text.contains(&said), "{said}: {text}");
        }
    }
}

#[test]
fn machines_have_their_ranges() {
    let (costs, spin) = (costs(), [0.0, 0.5, 1.0]);
    let lines = [Level::Low, Level::Middle, Level::High].map(|level| {
        let machine = here(&costs, spin, level);
        (machine.line_ns, machine.spin_ns_per_waiter)
    });
    assert_eq!(lines, [(40.0, 0.0), (50.0, 25.0), (60.0, 60.0)]);
    let other = elsewhere(&costs, [10.0, 90.0], 2, Level::Middle);
    assert_eq!((other.line_ns, other.bulk_line_ns, other.nodes), (30.0, 3.0, 2));
    assert!(other.sleep.is_none() && other.spin_ns_per_waiter == 0.0);
}

/// A figure's prediction for one task is the figure, whether it is a time or a rate.
#[test]
fn figures_and_speeds_are_inverse() {
    let parameters = Parameters::built_in().unwrap();
    for published in parameters.tables.iter().flat_map(|workload| &workload.published) {
        for tasks in [1, 4, 128] {
            let speed = published.units_per_s(12.5, tasks);
            assert_near(published.figure_of(speed, tasks), 12.5, 1e-12, &published.figure);
        }
    }
}
