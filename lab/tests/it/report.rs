//! Tests of `uzram lab report`: all tables in smoke size, and the page in a browser.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::common::{PATIENCE, collect_within, finish, start, wait};
use crate::{corpus, lab};

/// Returns the command `uzram-lab report args`, with the smallest measurements.
fn report(dir: &Path, args: &[&str]) -> Command {
    let mut command = lab(&["report"]);
    command.arg(dir).args(["--quick", "--rounds", "1", "--seconds", "0.001", "--jobs", "1,2"]);
    command.args(args);
    command
}

fn json(dir: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(dir.join("report.json")).unwrap()).unwrap()
}

#[test]
fn every_table_in_smoke_size() {
    let temporary = tempfile::tempdir().unwrap();
    let named = temporary.path().join("a corpus");
    fs::rename(corpus(temporary.path()), &named).unwrap();
    let (dir, corpus) = (temporary.path().join("out"), named);
    // What needs block devices and takes longer has a test of its own (`commands.rs`).
    let listed = finish(lab(&["list"])).ok();
    let names =
        listed.lines().filter(|line| !line.starts_with(' ')).map(|line| line.split(' ').next().unwrap());
    let names: Vec<&str> = names.filter(|name| *name != "zs-lock-disk").collect();
    let mut command = report(&dir, &["--corpus", corpus.to_str().unwrap(), "--tables", &names.join(",")]);
    let ended = collect_within(start(&mut command), 4 * PATIENCE);
    assert!(ended.status.success(), "{}", ended.stderr);
    let tables = json(&dir)["tables"].as_array().unwrap().clone();
    assert_eq!(tables.len(), names.len());
    let page = fs::read_to_string(dir.join("report.html")).unwrap();
    for (table, listed) in tables.iter().zip(names) {
        let name = table["table"].as_str().unwrap();
        assert_eq!(listed, name);
        if let Some(why) = table["left_out"].as_str() {
            assert!(why.contains("is missing") && page.contains(why), "{name}: {why}");
            println!("skipped: {name}: {why}");
            continue;
        }
        assert!(!table["rows"].as_array().unwrap().is_empty(), "{name}");
        assert_eq!(table["published_source"]["title"].as_str().map(str::is_empty), Some(false), "{name}");
        assert!(ended.stderr.contains(&format!("{name}: took ")), "{}", ended.stderr);
        assert!(page.contains(&format!("<section id=\"{name}\">")), "{name}");
        let is_held = !table["scale"]["locks"].as_array().unwrap().is_empty();
        assert_eq!(is_held, ["slab-freeze", "zs-free", "lru-batch"].contains(&name), "{name}");
    }
    assert!(page.contains("Published, beside what the locks allow"));
    let command = "<code>uzram lab report DIR --quick --rounds 1 --seconds 0.001 --jobs 1,2 --corpus &#39;";
    assert!(page.contains(command), "{page}");
}

/// The widths and heights of screens, and whether the reader prefers dark ones.
const SCREENS: [(u32, u32, bool); 2] = [(390, 844, false), (1280, 800, true)];

/// Opens a page in a browser; returns what that prints, and its log.
fn open(
    (width, height, is_dark): (u32, u32, bool),
    page: &Path,
    dir: &Path,
    args: &[String],
) -> (String, String) {
    let (printed, log) = (dir.join("printed"), dir.join("log"));
    let mut command = Command::new("chromium");
    command
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"])
        .args(["--disable-background-networking", "--disable-component-update", "--hide-scrollbars"])
        .args(["--enable-logging=stderr", "--log-level=0"])
        .arg(format!("--user-data-dir={}", dir.join("profile").display()))
        .arg(format!("--window-size={width},{height}"))
        .arg(format!("--blink-settings=preferredColorScheme={}", if is_dark { 0 } else { 1 }))
        .args(args)
        .arg(format!("file://{}", page.display()))
        .stdin(Stdio::null())
        .stdout(File::create(&printed).unwrap())
        .stderr(File::create(&log).unwrap());
    let status = wait(&mut command.spawn().unwrap(), PATIENCE);
    let log = fs::read_to_string(&log).unwrap();
    assert!(status.success(), "{log}");
    (fs::read_to_string(&printed).unwrap(), log)
}

/// A script that is added to a copy of the page tells whether that is as wide as its frame, and its
/// background.
const FINDINGS: &str = "<script>
const root = document.documentElement;
const background = getComputedStyle(document.body).backgroundColor;
window.parent.postMessage([root.scrollWidth, window.innerWidth, background].join(' | '), '*');
</script></body>";

/// Writes a page with the copy in a frame as wide as the screen: browsers' windows are not as narrow as a
/// phone.
fn frame((width, height, _): (u32, u32, bool), path: &Path) {
    let html = format!(
        "<!DOCTYPE html><meta name='color-scheme' content='light dark'><title>none</title>
<script>window.onmessage = (event) => {{ document.title = event.data; }};</script>
<iframe src='copy.html' style='border:0;width:{width}px;height:{height}px'></iframe>"
    );
    fs::write(path, html).unwrap();
}

#[test]
fn a_browser_shows_the_page() {
    if !Command::new("chromium").arg("--version").output().is_ok_and(|output| output.status.success()) {
        println!("skipped: the report in a browser: the program chromium is missing");
        return;
    }
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path();
    finish(report(dir, &["--tables", "lru-batch,zs-free"])).ok();
    let [page, copy, framed] = ["report.html", "copy.html", "framed.html"].map(|name| dir.join(name));
    let text = fs::read_to_string(&page).unwrap();
    fs::write(&copy, text.replace("</body>", FINDINGS)).unwrap();
    let (dump, log) = open(SCREENS[0], &page, dir, &["--dump-dom".to_owned()]);
    // That is how it logs what pages do wrong.
    assert!(!log.contains("CONSOLE"), "{log}");
    for said in ["Wins and losses", "id=\"lru-batch\"", "id=\"zs-free\"", "</footer>"] {
        assert!(dump.contains(said), "{said}: {dump}");
    }
    for screen in SCREENS {
        frame(screen, &framed);
        let budget = "--virtual-time-budget=5000".to_owned();
        let (dump, _) = open(screen, &framed, dir, &["--dump-dom".to_owned(), budget]);
        let title = dump.split_once("<title>").unwrap().1.split_once("</title>").unwrap().0;
        let found: Vec<&str> = title.split(" | ").collect();
        let width = screen.0.to_string();
        assert_eq!(found[..2], [&width, &width], "the page is as wide as the screen: {dump}");
        let background = found[2].trim_matches(|char: char| !char.is_ascii_digit());
        let light: u32 = background.split(", ").map(|part| part.parse::<u32>().unwrap()).sum();
        assert_eq!(light < 200, screen.2, "{title}");
    }
}
