//! `uzram run`: a stress of all that a program may do; ends of the pager, the keeper and whole groups of
//! processes; and the rights of others.

use crate::common::*;

/// A seed of this run, which is printed.
fn seed() -> u64 {
    let seed = std::process::id().into();
    println!("seed {seed}");
    seed
}

const LIMIT: &str = "run --limit 16M --spill /var/tmp:1G --";

#[test]
fn stress() {
    let Some(program) = Program::if_able("stress") else { return };
    let seconds = std::env::var("UZRAM_RUN_STRESS_SECONDS").map_or(20, |text| text.parse().unwrap());
    let child = start(bare_command(LIMIT).arg(&program.path).args([seconds, seed()].map(|n| n.to_string())));
    let ended = collect_within(child, Duration::from_secs(seconds) + 2 * PATIENCE);
    assert!(ended.status.success() && ended.stdout.ends_with("stress is right\n"), "{ended}");
}

/// What the system has swapped out itself comes back when the pager takes it, and after forks.
#[test]
fn stress_where_the_system_swaps() {
    let (Some(program), Some(cgroup)) = (Program::if_able("stress"), Cgroup::new("swaps-run", 24 * MIB))
    else {
        return;
    };
    let Some(place) = BlockPlace::alone("") else { return };
    let device = place.swap_on("--size 1G");
    let mut command = cgroup.command(UZRAM);
    command.args(LIMIT.words()).arg(&program.path).args(["8", &seed().to_string()]);
    let child = start(&mut command);
    wait_until("memory is swapped out", || swapped_bytes(&device) > 4 * MIB);
    let ended = collect_within(child, 3 * PATIENCE);
    assert!(ended.status.success() && ended.stdout.ends_with("stress is right\n"), "{ended}");
    place.swap_off();
}

/// A program that pages without an end, its pager and its keeper.
struct Paging {
    program: Child,
    helpers: [Pid; 2],
}

impl Paging {
    fn start(command: &mut Command) -> Paging {
        let program = start(command);
        let mut helpers = vec![];
        wait_until("it has a pager and a keeper", || {
            let of = |name| children(program.id(), name).into_iter().next();
            helpers = ["uzram-pager", "uzram-keeper"].into_iter().filter_map(of).collect();
            helpers.len() == 2
        });
        Paging { program, helpers: [0, 1].map(|nth| Pid::from_raw(helpers[nth] as i32).unwrap()) }
    }

    /// Waits for its end. Nothing of it is left.
    fn ended(self) -> Ended {
        let ended = collect(self.program);
        wait_until("nothing is left", || !self.helpers.into_iter().any(is_running));
        ended
    }
}

fn stressed(program: &Program, seed: u64) -> Command {
    let mut command = bare_command(LIMIT);
    command.arg(&program.path).args(["60", &seed.to_string(), "still"]);
    command
}

#[test]
fn nobody_reads_zeros_when_the_pager_or_the_keeper_is_killed() {
    let Some(program) = Program::if_able("stress") else { return };
    let seed = seed();
    let mut random = Random::new(seed);
    for round in 0..18 {
        let paging = Paging::start(&mut stressed(&program, seed + round));
        thread::sleep(Duration::from_millis(random.below_u64(400)));
        let first = random.below(2);
        kill(paging.helpers[first]);
        if round % 3 == 0 {
            // It may have ended with the first.
            let _ = kill_process(paging.helpers[1 - first], Signal::KILL);
        }
        let ended = paging.ended();
        assert_eq!(ended.status.signal(), Some(libc::SIGKILL), "{ended}");
        assert!(!ended.stderr.contains("stress.c"), "{ended}");
    }
}

#[test]
fn programs_end_in_their_own_way_when_all_are_asked_to() {
    let Some(program) = Program::if_able("stress") else { return };
    let paging = Paging::start(stressed(&program, seed()).process_group(0));
    thread::sleep(Duration::from_millis(500));
    let group = Pid::from_child(&paging.program);
    rustix::process::kill_process_group(group, Signal::TERM).unwrap();
    // They block it. They may have ended with the program.
    let _ = paging.helpers.map(|helper| kill_process(helper, Signal::TERM));
    let ended = paging.ended();
    assert!(ended.status.success() && ended.stdout.ends_with("was asked to end\n"), "{ended}");
}

#[test]
fn namespaces_are_as_without() {
    let Some(program) = Program::if_able("stress") else { return };
    let path = arg(&program.path);
    for (options, script, said) in [
        // Every process of a namespace is asked to end.
        ("-pf --mount-proc", "$RUN $0 60 7 still & sleep 2; kill -TERM -1; wait", "was asked to end\n"),
        ("-pf --mount-proc", "exec $RUN $0 2 7 still", "stress is right\n"),
        ("-pf --mount-proc", "exec $RUN $0 2 7", "stress is right\n"),
        ("-Ur", "exec $RUN $0 2 7", "stress is right\n"),
        ("-Urpf --mount-proc", "exec $RUN $0 2 7", "stress is right\n"),
    ] {
        let mut command = Command::new("unshare");
        command.args(options.words()).args(["sh", "-c", script, path]);
        let ended = finish(command.env("RUN", format!("{UZRAM} {LIMIT}")));
        if ended.stderr.starts_with("unshare: ") {
            println!("skipped: unshare {options}: {}", ended.stderr.trim());
            continue;
        }
        assert!(ended.status.success() && ended.stdout.ends_with(said), "{options}, {script}: {ended}");
    }
}

/// Compiles a program that other users may execute, if this is root.
fn intruder() -> Option<Program> {
    Run::if_root()?;
    let program = Program::compiled("intruder", "");
    set_mode(program.path.parent().unwrap(), 0o755);
    Some(program)
}

#[test]
fn a_user_without_rights_reaches_no_pager_of_root() {
    let Some(intruder) = intruder() else { return };
    let program = Program::compiled("stress", "");
    let mut drops = bare_command("run --limit 24M --");
    drops.arg(&intruder.path).arg("drops");
    for (mut command, first) in [(stressed(&program, seed()), "seed"), (drops, "dropped")] {
        let mut paging = Paging::start(&mut command);
        let mut line = String::new();
        BufReader::new(paging.program.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with(first), "{line}");
        let ids = paging.helpers.map(|id| id.to_string());
        let asked = finish(Command::new(&intruder.path).arg("asks").args(&ids).uid(NOBODY).gid(NOBODY)).ok();
        assert_eq!(asked, format!("{}: 0\n{}: 0\n", ids[0], ids[1]));
        assert!(paging.program.try_wait().unwrap().is_none());
        paging.program.kill().unwrap();
        paging.ended();
    }
}

#[test]
fn a_program_that_has_dropped_root_reaches_nothing_by_the_pager() {
    let Some(intruder) = intruder() else { return };
    let mut victim = Killed(Command::new("sleep").arg("600").spawn().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("made");
    for how in ["breakpoint", "call"] {
        let mut command = bare_command("run --limit 24M --");
        command.arg(&intruder.path).args(["writes", &victim.id().to_string(), arg(&file), how]);
        let ended = finish(command);
        assert_eq!(
            (ended.status.signal(), &*ended.stdout),
            (Some(libc::SIGKILL), "found\n"),
            "{how}: {ended}"
        );
        assert!(!file.exists() && victim.try_wait().unwrap().is_none(), "{how}: {ended}");
    }
}
