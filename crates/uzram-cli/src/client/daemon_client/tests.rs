//! The client against a fake daemon, which ends connections without an answer.

use std::os::unix::net::UnixListener;
use std::thread::JoinHandle;

use super::*;
use crate::system::runtime_dir::RuntimeDir;

const ANSWER: &str = "HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n{\"a\":1}";
const REFUSAL: &str = "HTTP/1.1 409 Conflict\r\nContent-Length: 14\r\n\r\n{\"error\":\"no\"}";

/// What the fake daemon does with a connection.
#[derive(Clone, Copy, Debug)]
enum Act {
    /// Reads the request, and sends this, or a part of an answer.
    Say(&'static str),
    /// Reads the request, and closes.
    Close,
    /// Closes without reading.
    Reset,
    /// Reads the request, gives up the lock, and closes.
    End,
}

/// A fake daemon, which does one act for each connection and then stops listening, with its lock still held
/// unless an act gave it up.
struct Fake {
    daemon: Daemon,
    thread: JoinHandle<(Vec<String>, Option<RuntimeDir>)>,
    _root: tempfile::TempDir,
}

impl Fake {
    fn start(acts: Vec<Act>) -> Fake {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("run");
        let mut dir = RuntimeDir::claim(path.clone()).unwrap();
        let listener = dir.bind().unwrap();
        let thread = thread::spawn(move || serve(&listener, acts, dir));
        Fake { daemon: Daemon::in_dir(path).unwrap(), thread, _root: root }
    }

    fn requests(self) -> Vec<String> {
        self.thread.join().unwrap().0
    }
}

fn serve(listener: &UnixListener, acts: Vec<Act>, dir: RuntimeDir) -> (Vec<String>, Option<RuntimeDir>) {
    let (mut requests, mut dir) = (Vec::new(), Some(dir));
    for act in acts {
        let (mut stream, _) = listener.accept().unwrap();
        if !matches!(act, Act::Reset) {
            requests.push(read_request(&mut stream));
        }
        match act {
            Act::Say(text) => stream.write_all(text.as_bytes()).unwrap(),
            Act::End => drop(dir.take()),
            Act::Close | Act::Reset => {}
        }
    }
    (requests, dir)
}

fn read_request(stream: &mut UnixStream) -> String {
    let (mut bytes, mut piece) = (Vec::new(), [0; 4096]);
    loop {
        let count = stream.read(&mut piece).unwrap();
        assert!(count > 0, "the request ended early");
        bytes.extend_from_slice(&piece[..count]);
        let text = str::from_utf8(&bytes).unwrap();
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let (_, len) = head.split_once("Content-Length: ").unwrap();
        if body.len() >= len.lines().next().unwrap().parse().unwrap() {
            return head.lines().next().unwrap().to_owned();
        }
    }
}

#[test]
fn an_answer_cut_anywhere_is_not_complete() {
    for length in ["Content-Length: 7\r\n", ""] {
        let answer = format!("HTTP/1.1 200 OK\r\n{length}\r\n{{\"a\":1}}");
        assert_eq!(parse_answer(answer.as_bytes()).unwrap(), Some((200, json!({ "a": 1 }))));
        for len in 0..answer.len() {
            assert!(matches!(parse_answer(&answer.as_bytes()[..len]), Ok(None)), "{len}");
        }
    }
    assert_eq!(parse_answer(b"HTTP/1.1 204 No Content\r\n\r\n").unwrap(), Some((204, Value::Null)));
    assert!(parse_answer(b"SSH-2.0-OpenSSH\r\n").is_err());
    // Complete, but not what a daemon sends: another try would bring the same.
    assert!(parse_answer(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n{").is_err());
}

#[test]
fn a_request_is_sent_again_until_it_is_answered() {
    let cut_short = Act::Say("HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n{\"a");
    let cuts = [Act::Close, Act::Reset, Act::Say(""), Act::Say("HTTP/1.1 2"), cut_short];
    let pairs = cuts.iter().flat_map(|first| cuts.iter().map(move |second| vec![*first, *second]));
    let all: Vec<_> = [vec![]].into_iter().chain(cuts.iter().map(|cut| vec![*cut])).chain(pairs).collect();
    thread::scope(|scope| {
        for cuts in &all {
            scope.spawn(|| {
                for (method, last) in ["GET", "POST"].iter().flat_map(|one| [(one, ANSWER), (one, REFUSAL)]) {
                    ask_after(cuts, method, last);
                }
                ask_after(cuts, "DELETE", REFUSAL);
            });
        }
    });
}

fn ask_after(cuts: &[Act], method: &str, last: &'static str) {
    let what = format!("{cuts:?}, {method}, {last}");
    let fake = Fake::start(cuts.iter().copied().chain([Act::Say(last)]).collect());
    match (last == ANSWER, fake.daemon.ask(method, "/v1/x", Some(&json!({ "b": 2 })))) {
        (true, Ok(answer)) => assert_eq!(answer, json!({ "a": 1 }), "{what}"),
        (false, Err(failure)) => {
            let note = if method == "GET" || cuts.is_empty() { "" } else { REPEATED };
            assert_eq!(failure.into_line(), format!("no{note}"), "{what}");
        }
        (_, answer) => panic!("{what}: {answer:?}"),
    }
    let unread = cuts.iter().filter(|cut| matches!(cut, Act::Reset)).count();
    let wanted = vec![format!("{method} /v1/x HTTP/1.1"); cuts.len() + 1 - unread];
    assert_eq!(fake.requests(), wanted, "{what}");
}

#[test]
fn work_is_sent_again_until_it_is_interrupted() {
    let [none, came] = [false, true].map(Interrupts::pretend);
    let put = |fake: &Fake, interrupts: &Interrupts| {
        fake.daemon.ask_for_work(("PUT", "/v1/x", &json!({ "value": "1" })), interrupts, || {})
    };
    let fake = Fake::start(vec![Act::Close, Act::Reset, Act::Say(ANSWER)]);
    assert_eq!(put(&fake, &none).unwrap(), json!({ "a": 1 }));
    assert_eq!(fake.requests().len(), 2);
    let fake = Fake::start(vec![Act::Close, Act::Say(REFUSAL)]);
    assert_eq!(put(&fake, &none).unwrap_err().into_line(), format!("no{REPEATED}"));

    let fake = Fake::start(vec![Act::Close]);
    assert_eq!(put(&fake, &came).unwrap_err().into_line(), "interrupted");
    assert_eq!(fake.requests().len(), 1);
}

#[test]
fn a_daemon_that_ends_is_not_asked_again() {
    for cuts in [&[][..], &[Act::Close], &[Act::Reset, Act::Close]] {
        let acts = || cuts.iter().copied().chain([Act::End]).collect();
        let fake = Fake::start(acts());
        let failure = fake.daemon.ask("GET", "/v1/x", None).unwrap_err();
        assert_eq!(failure.into_line(), "the daemon ended before it had answered");
        let fake = Fake::start(acts());
        assert!(fake.daemon.about_if_running().is_err(), "it ran when it was asked");
        let fake = Fake::start(acts());
        assert!(!fake.daemon.ask_to_end(false).unwrap(), "{cuts:?}: to have ended is what was wanted");
    }
    let fake = Fake::start(vec![Act::Close, Act::Say(REFUSAL)]);
    assert_eq!(fake.daemon.ask_to_end(false).unwrap_err().into_line(), format!("no{REPEATED}"));
}

#[test]
fn patience_ends() {
    let mut fake = Fake::start(vec![Act::Close; 2]);
    // Afterwards nobody listens, but the lock is held.
    fake.daemon.patience = Duration::from_secs(1);
    let (thread, begun) = (fake.thread, Instant::now());
    let told = fake.daemon.ask("POST", "/v1/x", None).unwrap_err().into_line();
    assert!(told.contains("before it had answered, 2 times in ") && told.ends_with(REPEATED), "{told}");
    assert!(begun.elapsed() >= fake.daemon.patience, "{:?}", begun.elapsed());

    // To a first request, it is a daemon that does not run, after a moment in which it may start.
    let begun = Instant::now();
    assert!(fake.daemon.about_if_running().unwrap().is_none());
    assert!(begun.elapsed() >= LISTENER_PATIENCE, "{:?}", begun.elapsed());
    let (_, dir) = thread.join().unwrap();
    let mut dir = dir.unwrap();
    let starts = thread::spawn(move || {
        thread::sleep(Duration::from_millis(50));
        let listener = dir.bind().unwrap();
        serve(&listener, vec![Act::Say(ANSWER)], dir)
    });
    assert_eq!(fake.daemon.ask("GET", "/v1/x", None).unwrap(), json!({ "a": 1 }));

    // Without a lock, nobody is expected.
    drop(starts.join().unwrap());
    drop(UnixListener::bind(&fake.daemon.socket).unwrap());
    // At least one attempt is fast, even on a busy machine.
    let is_fast = || {
        let begun = Instant::now();
        assert!(fake.daemon.about_if_running().unwrap().is_none());
        begun.elapsed() < LISTENER_PATIENCE / 2
    };
    assert!((0..20).any(|_| is_fast()));
}
