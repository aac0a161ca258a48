use super::*;

static GO_ON: AtomicBool = AtomicBool::new(false);

fn shell(script: &'static [&'static str], ready: Ready) -> Workload {
    Workload { name: "shell", program: "sh", args: script, file: None, ready }
}

#[test]
fn a_program_that_fails_says_why_and_leaves_nothing() {
    let fails = shell(&["-c", "sleep 1000 & echo no luck >&2; exit 3"], Ready::Says);
    let error = memory_of(&fails, 1, &GO_ON).err().unwrap().to_string();
    assert_eq!(error, "sh ended with status 3: no luck");
    let cannot = Workload { file: Some(("no/file", "")), ..shell(&[], Ready::Says) };
    let error = memory_of(&cannot, 1, &GO_ON).err().unwrap().to_string();
    assert!(error.starts_with("sh cannot run: No such file"), "{error}");
    let absent = Workload { program: "no-such-program", ..cannot };
    assert_eq!(memory_of(&absent, 1, &GO_ON).err().unwrap().to_string(), "no-such-program is not installed");
    let stop = AtomicBool::new(true);
    let hangs = shell(&["-c", "sleep 1000"], Ready::Holds(u64::MAX));
    assert_eq!(memory_of(&hangs, 1, &stop).err().unwrap().to_string(), "interrupted");
    for at_once in [false, true] {
        assert_eq!(build(1, at_once, &stop).err().unwrap().to_string(), "interrupted");
    }
}

#[test]
fn the_whole_has_every_page_in_groups_of_neighbours() {
    let part = |fill: u8, pages: usize| {
        let page =
            |number: usize| AlignedPage(std::array::from_fn(|at| if at == 0 { number as u8 } else { fill }));
        Corpus::new((0..pages).map(page).collect()).unwrap()
    };
    let processes = Processes { parts: vec![("a", part(1, 40)), ("b", part(2, 20))], left_out: Vec::new() };
    let whole = processes.whole().unwrap();
    let pages: Vec<(u8, u8)> = whole.pages().map(|page| (page[1], page[0])).collect();
    let runs = [(1, 0..16), (2, 0..16), (1, 16..32), (2, 16..20), (1, 32..40)];
    let wanted: Vec<_> =
        runs.into_iter().flat_map(|(fill, numbers)| numbers.map(move |number| (fill, number))).collect();
    assert_eq!(pages, wanted);
}
