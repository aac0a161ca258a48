//! `--json`: every command has it, what it prints has one style, and errors are JSON, too.

use serde_json::Deserializer;

use crate::common::*;

/// Separate programs, with tests of their own.
const SIBLINGS: [&str; 2] = ["bench", "lab"];
const SILENT: [&str; 6] = ["remove", "set", "reset", "kick", "reload", "down"];
/// Words for which a number has a unit, at the end of a name.
const MEASURES: [&str; 12] =
    ["size", "limit", "len", "length", "latency", "outage", "memory", "age", "time", "max", "used", "since"];
const UNITS: [&str; 8] = ["bytes", "pages", "s", "ms", "us", "ns", "percent", "obj"];

/// Returns the commands that `--help` lists, without those that have commands themselves.
fn leaves(path: &[String]) -> Vec<Vec<String>> {
    let words: Vec<&str> = path.iter().map(String::as_str).chain(["--help"]).collect();
    let help = finish(bare_command(&words)).ok();
    let is_sibling = path.first().is_some_and(|name| SIBLINGS.contains(&name.as_str()));
    let wanted = ["--json", "Example", &format!("uzram {}", path.join(" "))];
    // Of `swap` only the commands have examples.
    let is_complete = is_sibling || path == ["swap"] || wanted.iter().all(|words| help.contains(words));
    assert!(is_complete, "{path:?}: {help}");
    let Some((_, listed)) = help.split_once("\nCommands:\n").filter(|_| !is_sibling) else {
        return vec![path.to_vec()];
    };
    let names = listed.lines().take_while(|line| line.starts_with("  ")).filter_map(|line| {
        // Others are the continuation of a description.
        line.strip_prefix("  ")?.split(' ').next().filter(|name| !name.is_empty() && *name != "help")
    });
    names.flat_map(|name| leaves(&[path, &[name.to_owned()]].concat())).collect()
}

fn check_style(command: &str, value: &Value) {
    match value {
        Value::Object(fields) => fields.iter().for_each(|(name, field)| {
            let is_name = name.starts_with(|c: char| c.is_ascii_lowercase())
                && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
            assert!(is_name, "{command}: {name}");
            let words: Vec<&str> = name.split('_').collect();
            let has_unit = words.iter().any(|word| UNITS.contains(word));
            let is_measure = words.last().is_some_and(|word| MEASURES.contains(word));
            assert!(!field.is_number() || has_unit || !is_measure, "{command}: {name} has no unit");
            match (name.as_str(), field) {
                // The names of attributes are the kernel's, and so are their units.
                ("attributes", Value::Object(fields)) => {
                    let others = fields.values().filter(|field| !field.is_number());
                    others.for_each(|field| check_style(command, field));
                }
                // By the numbers of CPUs.
                ("cpus", _) => {}
                _ => check_style(command, field),
            }
        }),
        Value::Array(values) => values.iter().for_each(|value| check_style(command, value)),
        Value::String(text) => assert!(!text.contains('\n'), "{command}: {text:?}"),
        _ => {}
    }
}

fn documents(text: &str) -> Vec<Value> {
    Deserializer::from_str(text)
        .into_iter()
        .collect::<Result<_, _>>()
        .unwrap_or_else(|why| panic!("{why}: {text}"))
}

#[test]
fn every_command_prints_json_of_one_style() {
    let place = Place::new();
    let config = place.write("uzram.toml", "[zram0]\nsize = '1M'\n");
    let own = std::process::id();
    let _daemon = place.up("");
    let _client = connect(&place.socket("nbd.sock"));
    let json = place.json("stat zram0");
    let attributes = json["attributes"].as_object().unwrap();
    for name in ["policy", "mm_stat", "io_stat", "bd_stat", "debug_stat", "backing", "lru", "backing_state"] {
        assert!(attributes[name].is_object(), "{name}: {}", attributes[name]);
    }
    let [other, empty, pages, dictionary] =
        ["other", "empty", "pages", "pages.dict"].map(|name| place.path(name));
    let commands = format!(
        "up --size 1M --log error --runtime-dir {other} --exec true
        add zram1 --size 1M --recompress zstd
        list
        {}
        stat zram1
        stat zram1 recomp_algorithm
        stat zram0 block_state
        set zram1 mem_limit=1M
        reset zram1
        remove zram1
        clients
        status
        swap status
        upgrade
        check
        check --config {config}
        corpus --size 1M -o {pages} {own}
        train {pages} -o {dictionary} --size 1K
        kick 1
        down
        run --limit 64M true
        detach --force --runtime-dir {empty}",
        attributes.keys().map(|name| format!("stat zram0 {name}\n")).collect::<String>()
    );
    let commands: Vec<Vec<&str>> =
        commands.lines().map(Words::words).filter(|words| !words.is_empty()).collect();
    for command in &commands {
        let ended = place.run(&[&["--json"], &command[..]].concat());
        let (stdout, stderr) = (documents(&ended.stdout), documents(&ended.stderr));
        stdout.iter().chain(&stderr).for_each(|value| check_style(&command.join(" "), value));
        let printed = if ["up", "run"].contains(&command[0]) { stderr } else { stdout };
        let is_done = ended.status.success();
        let is_silent = SILENT.contains(&command[0]) || (!is_done && command[0] != "run");
        assert_eq!(printed.is_empty(), is_silent, "{command:?}: {ended}");
        let may_fail = ["run", "detach", "kick"].contains(&command[0]);
        assert!(is_done || may_fail, "{command:?}: {ended}");
    }
    // Those that take more than a machine has everywhere.
    let elsewhere = ["attach", "swap on", "swap off", "recover", "reload", "backing sweep"];
    let leaves = leaves(&[]);
    for leaf in leaves.iter().map(|leaf| leaf.join(" ")) {
        let is_known = commands.iter().any(|command| command.join(" ").starts_with(&leaf));
        let is_tried = is_known || elsewhere.contains(&leaf.as_str()) || SIBLINGS.contains(&leaf.as_str());
        assert!(is_tried, "`uzram {leaf} --json` is not tried here");
    }
    // And the help lists all of them.
    let elsewhere = elsewhere.iter().map(|command| command.words()[0]);
    let tried = commands.iter().map(|command| command[0]).chain(elsewhere).chain(SIBLINGS);
    for first in tried.filter(|first| cfg!(feature = "remote") || *first != "backing") {
        assert!(leaves.iter().any(|leaf| leaf[0] == first), "`uzram --help` does not list {first}");
    }
}

#[test]
fn errors_are_json_with_the_setting_and_the_same_status() {
    let place = Place::new();
    let _daemon = place.up("");
    for (args, status, setting) in [
        ("stat zram9", 1, None),
        ("set zram0 mem_limit=much", 1, Some("mem_limit")),
        ("reload", 1, Some("tls-cert")),
        ("attach zram0", 1, None),
        ("swap off", 1, None),
        ("recover --runtime-dir ABSENT", 3, None),
        ("status --runtime-dir ABSENT", 3, None),
        ("up --size 1X", 2, Some("disksize")),
        ("up --sise 1M", 2, None),
        ("stat", 2, None),
        ("fly", 2, None),
        ("swap on --priority high", 2, Some("priority")),
        ("run --limit 1K true", 125, Some("limit")),
        ("run --limit 64M /etc", 126, None),
        ("run --limit 64M no-such-program", 127, None),
    ] {
        let args = args.replace("ABSENT", &place.path("absent"));
        let text = place.run(&args);
        let line = text.complaint(status).to_owned();
        let ended = place.run(&format!("--json {args}"));
        let json: Value = serde_json::from_str(&ended.stderr).unwrap();
        let wanted = serde_json::json!({ "error": line, "setting": setting });
        assert_eq!((ended.status.code(), &json), (Some(status), &wanted), "{args}");
        assert_eq!((ended.stdout.as_str(), ended.stderr.lines().count()), ("", 1), "{args}");
    }
}

#[test]
fn check_fails_if_what_is_asked_for_does_not_work() {
    let place = Place::without_rights();
    let line = place.run("check --for disk --for run").stderr;
    for purpose in ["swap", "disk", "run"] {
        let ended = place.run(&format!("check --json --for {purpose}"));
        let json: Value = serde_json::from_str(&ended.stdout).unwrap();
        let [asked] = &json["purposes"].as_array().unwrap()[..] else { panic!("{json}") };
        assert_eq!(asked["purpose"], purpose, "{json}");
        let works = asked["works"].as_bool().unwrap();
        let status = Some(i32::from(!works));
        assert_eq!((ended.status.code(), ended.stderr.is_empty()), (status, works), "{json}");
        assert!(!works || purpose == "run" || is_root(), "{json}");
        for name in asked["missing"].as_array().unwrap() {
            let checks = json["checks"].as_array().unwrap();
            let check = checks.iter().find(|check| check["name"] == *name).unwrap();
            assert_ne!(check["works"], "yes", "{json}");
            assert!(ended.stderr.contains(name.as_str().unwrap()), "{ended}");
        }
    }
    assert!(line.starts_with("uzram: disk does not work here: it needs "), "{line}");
    assert!(line.contains("capabilities ("), "{line}");
    assert_eq!(place.run("check").status.code(), Some(0), "it only reports");
    place.run("check --for fun").says(2, "fun");
}
