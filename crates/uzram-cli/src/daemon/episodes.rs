//! Episodes: times during which something is wrong. One is logged when it begins and when it has ended, with
//! the number of failures in between, and once an hour if it lasts.
//!
//! An episode ends when nothing has failed for [`CALM_MS`]. Each time a condition returns within an hour,
//! that time doubles, up to an hour, so that hostile clients cannot fill the log.
//!
//! Open episodes are kept in memory that outlives the process ([`KeptEpisode`]): the next one goes on.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How long nothing must fail before an episode ends.
pub const CALM_MS: u64 = 3000;
/// An episode that lasts is logged this often.
const HOUR_MS: u64 = 3_600_000;
/// The shortest and the longest time until an open episode is looked at again: as long as it has not changed.
const LOOK_MS: [u64; 2] = [1000, 60_000];

/// What can be wrong with a device, or with a listener for its clients.
#[derive(Debug, PartialEq, Eq)]
pub struct Condition {
    pub name: &'static str,
    pub ended: &'static str,
    pub counted: &'static str,
}

impl Condition {
    pub const fn of(name: &'static str, ended: &'static str, counted: &'static str) -> Condition {
        Condition { name, ended, counted }
    }
}

/// Whether a condition holds at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    Clear,
    /// Keeps an open episode open; does not open one.
    Lingering,
    Active,
}

/// A condition at the moment.
#[derive(Debug)]
pub struct Reading {
    pub subject: String,
    pub condition: &'static Condition,
    /// Says what is wrong, and which setting to change.
    pub text: String,
    pub count: u64,
    pub level: Level,
}

/// An open episode, in memory that outlives the process; all numbers are 0 if there is none.
#[derive(Default)]
#[repr(C)]
pub struct KeptEpisode {
    key: AtomicU64,
    began_ms: AtomicU64,
    count: AtomicU64,
    text: AtomicU64,
}

pub struct Episodes<'a> {
    kept: &'a [KeptEpisode],
    episodes: Vec<Episode<'a>>,
}

struct Episode<'a> {
    key: u64,
    /// The count that was read last.
    seen: u64,
    open: Option<Open>,
    kept: Option<&'a KeptEpisode>,
    calm_ms: u64,
    ended_ms: Option<u64>,
}

/// An open episode. Times are in milliseconds since boot.
struct Open {
    began_ms: u64,
    count: u64,
    /// The hash of the text that was logged last.
    text: u64,
    logged_ms: u64,
    changed_ms: u64,
    /// Since when it is over, if it is.
    over_ms: Option<u64>,
}

impl Open {
    fn new(began_ms: u64, count: u64, text: u64, now_ms: u64) -> Open {
        Open { began_ms, count, text, logged_ms: now_ms, changed_ms: now_ms, over_ms: None }
    }
}

impl<'a> Episodes<'a> {
    /// Goes on with the episodes that are kept in `kept`, and keeps later ones there as long as there is
    /// room.
    pub fn new(kept: &'a [KeptEpisode]) -> Self {
        Episodes { kept, episodes: Vec::new() }
    }

    /// Takes note of all conditions. Returns the lines to log, and after how long to look again if nothing is
    /// noted before.
    pub fn look(&mut self, readings: &[Reading], now_ms: u64) -> (Vec<String>, Option<Duration>) {
        let keys: Vec<u64> =
            readings.iter().map(|reading| hash(&[&reading.subject, reading.condition.name])).collect();
        // A device that was removed has no conditions.
        self.episodes.retain(|episode| keys.contains(&episode.key));
        self.kept.iter().filter(|kept| !keys.contains(&kept.key())).for_each(KeptEpisode::clear);
        let mut lines = Vec::new();
        for (key, reading) in keys.into_iter().zip(readings) {
            let at = self.episodes.iter().position(|episode| episode.key == key);
            let at = at.unwrap_or_else(|| {
                self.episodes.push(Episode::new(key, self.kept, now_ms));
                self.episodes.len() - 1
            });
            let episode = &mut self.episodes[at];
            lines.extend(episode.look(reading, now_ms));
            episode.keep(self.kept);
        }
        (lines, self.episodes.iter().filter_map(|episode| episode.next_look(now_ms)).min())
    }
}

impl<'a> Episode<'a> {
    /// Goes on with the episode that is kept under this key, if there is one.
    fn new(key: u64, kept: &'a [KeptEpisode], now_ms: u64) -> Self {
        let kept = kept.iter().find(|kept| kept.key() == key);
        let open = kept.map(|kept| {
            let [began_ms, count, text] =
                [&kept.began_ms, &kept.count, &kept.text].map(|number| number.load(Ordering::Relaxed));
            Open::new(began_ms.min(now_ms), count, text, now_ms)
        });
        Episode { key, seen: 0, open, kept, calm_ms: CALM_MS, ended_ms: None }
    }

    fn look(&mut self, reading: &Reading, now_ms: u64) -> Option<String> {
        let Reading { subject, condition, text, count, level } = reading;
        // A device that was reset counts from 0 again.
        let failures = count.checked_sub(self.seen).unwrap_or(*count);
        self.seen = *count;
        let is_on = failures > 0 || *level == Level::Active;
        let text_hash = hash(&[text]);
        let Some(open) = &mut self.open else {
            if !is_on {
                return None;
            }
            let is_again = self.ended_ms.is_some_and(|ended| now_ms - ended < HOUR_MS);
            self.calm_ms = if is_again { (2 * self.calm_ms).min(HOUR_MS) } else { CALM_MS };
            self.open = Some(Open::new(now_ms, failures, text_hash, now_ms));
            return Some(format!("{subject}: {text}"));
        };
        open.count = open.count.saturating_add(failures);
        if failures > 0 {
            open.changed_ms = now_ms;
        }
        if is_on || *level == Level::Lingering {
            open.over_ms = None;
        } else {
            open.over_ms.get_or_insert(now_ms);
        }
        let counted = || match open.count {
            0 => String::new(),
            count => format!("; {}: {count}", condition.counted),
        };
        let over_ms = open.over_ms.filter(|over_ms| now_ms - over_ms >= self.calm_ms);
        if let Some(over_ms) = over_ms {
            let line = format!(
                "{subject}: {} after {}{}",
                condition.ended,
                seconds(over_ms - open.began_ms),
                counted()
            );
            (self.open, self.ended_ms) = (None, Some(now_ms));
            return Some(line);
        }
        let since_ms = now_ms - open.logged_ms;
        let is_other = *level == Level::Active && open.text != text_hash;
        if is_other && since_ms >= self.calm_ms {
            (open.text, open.logged_ms, open.changed_ms) = (text_hash, now_ms, now_ms);
            self.calm_ms = (2 * self.calm_ms).min(HOUR_MS);
            return Some(format!("{subject}: {text}"));
        }
        if since_ms >= HOUR_MS && open.over_ms.is_none() {
            let line = format!("{subject}: {text}, for {}{}", seconds(now_ms - open.began_ms), counted());
            (open.text, open.logged_ms) = (text_hash, now_ms);
            return Some(line);
        }
        if is_other {
            open.changed_ms = now_ms;
        }
        None
    }

    /// Writes the open episode to memory that outlives the process, or clears it there.
    fn keep(&mut self, all: &'a [KeptEpisode]) {
        let Some(open) = &self.open else {
            self.kept.take().into_iter().for_each(KeptEpisode::clear);
            return;
        };
        self.kept = self.kept.or_else(|| all.iter().find(|kept| kept.key() == 0));
        if let Some(kept) = self.kept {
            kept.began_ms.store(open.began_ms, Ordering::Relaxed);
            kept.count.store(open.count, Ordering::Relaxed);
            kept.text.store(open.text, Ordering::Relaxed);
            // Last: an episode with a key is whole.
            kept.key.store(self.key, Ordering::Release);
        }
    }

    fn next_look(&self, now_ms: u64) -> Option<Duration> {
        let open = self.open.as_ref()?;
        let in_ms = match open.over_ms {
            Some(over_ms) => (over_ms + self.calm_ms).saturating_sub(now_ms),
            None => (now_ms - open.changed_ms).clamp(LOOK_MS[0], LOOK_MS[1]),
        };
        Some(Duration::from_millis(in_ms))
    }
}

impl KeptEpisode {
    fn key(&self) -> u64 {
        self.key.load(Ordering::Acquire)
    }

    fn clear(&self) {
        self.key.store(0, Ordering::Release);
    }
}

/// Returns a hash, not 0, that all versions of this program compute alike: FNV-1a.
fn hash(parts: &[&str]) -> u64 {
    let bytes = parts.iter().flat_map(|part| part.bytes().chain([0]));
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    }) | 1
}

fn seconds(ms: u64) -> String {
    match ms {
        0..9950 => format!("{:.1} s", ms as f64 / 1e3),
        _ => format!("{} s", (ms + 500) / 1000),
    }
}

#[cfg(test)]
mod tests {
    use uzram::random::Random;

    use super::*;

    static CONDITION: Condition = Condition::of("writes", "writes are accepted again", "refused");

    fn reading(count: u64, level: Level, text: &str) -> Reading {
        Reading { subject: "zram0".to_owned(), condition: &CONDITION, text: text.to_owned(), count, level }
    }

    #[test]
    fn another_state_is_logged_once_and_a_lasting_one_each_hour() {
        let mut episodes = Episodes::new(&[]);
        let mut look = |at_ms, text| episodes.look(&[reading(0, Level::Active, text)], at_ms).0.pop();
        assert_eq!(look(0, "the backing is full").unwrap(), "zram0: the backing is full");
        assert_eq!(look(4000, "the backing fails").unwrap(), "zram0: the backing fails");
        for minute in 1..60 {
            assert_eq!(look(4000 + 60_000 * minute, "the backing fails"), None);
        }
        assert_eq!(
            look(4000 + HOUR_MS, "the backing fails").unwrap(),
            "zram0: the backing fails, for 3604 s"
        );
    }

    #[test]
    fn random_failures_are_all_counted_in_few_lines() {
        for seed in 0..12 {
            let mut random = Random::new(seed);
            let mut episodes = Episodes::new(&[]);
            let (mut now_ms, mut count, mut counted, mut begun, mut lines) = (0, 0, 0, false, 0);
            let pauses_ms = [1000, 10_000, 100_000][seed as usize % 3];
            while now_ms < 4 * HOUR_MS {
                count += [0, 0, 1, random.below_u64(100)][random.below(4)];
                let (logged, next) = episodes.look(&[reading(count, Level::Clear, "refused")], now_ms);
                for line in logged {
                    lines += 1;
                    let is_begin = line == "zram0: refused";
                    if let Some(refused) = line.strip_prefix("zram0: writes are accepted again after ") {
                        assert!(begun, "seed {seed}: {line}");
                        counted += refused.split_once(": ").unwrap().1.parse::<u64>().unwrap();
                        begun = false;
                    } else if is_begin {
                        assert!(!begun, "seed {seed}: {line}");
                        begun = true;
                    }
                }
                let pause_ms = 1 + random.below_u64(pauses_ms);
                now_ms += next.map_or(pause_ms, |next| pause_ms.min(next.as_millis() as u64));
            }
            assert!(begun || counted == count, "seed {seed}: {counted} of {count}");
            assert!(lines < 50, "seed {seed}: {lines} lines in four hours");
        }
    }
}
