//! Which master has which hash slots, and in which two slots the copies of an object lie.
//!
//! The slots of an object's copies are chosen once, before it is written, so that different masters have
//! them, and are kept as its [`Filling::home`](uzram::backing::Filling::home). Each slot has a *tag*, a
//! number whose text hashes to it: written in braces, it alone decides about the slot of a key.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::sync::OnceLock;

use redis::Value;
use uzram::{Error, ErrorKind, Result};

use crate::Server;

const SLOTS: u16 = 1 << 14;
/// Set in each home, so that none is 0.
const MARK: u32 = 1 << 31;
/// Where a home has its epoch: `[ mark 1 | epoch 3 | slot 14 | slot 14 ]`.
const EPOCH_SHIFT: u32 = 28;
/// The most nodes of a cluster, and the most masters; those of more are not used.
const MAX_NODES: usize = 1000;
/// How many epochs are told apart.
pub(super) const EPOCHS: u32 = 8;
const _: () = assert!(EPOCHS << EPOCH_SHIFT == MARK);

/// The masters of a cluster that objects can be written to, by the slots that they have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Topology {
    pub(super) masters: Vec<Master>,
    /// All nodes, the replicas included.
    pub(super) nodes: Vec<Server>,
    /// The identifiers of the masters that take no more.
    pub(super) full: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Master {
    pub(super) id: String,
    /// The identifier of its process; empty if it is not known.
    pub(super) run_id: String,
    pub(super) server: Server,
    pub(super) replicas: Vec<Server>,
    pub(super) ranges: Vec<RangeInclusive<u16>>,
}

impl Topology {
    pub(super) fn of_server(server: Server) -> Topology {
        let (id, run_id, nodes) = (String::new(), String::new(), vec![server.clone()]);
        let master = Master { id, run_id, server, replicas: Vec::new(), ranges: vec![0..=SLOTS - 1] };
        Topology { masters: vec![master], nodes, full: Vec::new() }
    }

    /// Parses the answer to `CLUSTER SLOTS`: of each range of slots the first and the last, and its nodes,
    /// the master first: address, port and identifier.
    pub(super) fn parse(answer: &Value) -> Topology {
        let (mut masters, mut nodes): (Vec<Master>, Vec<Server>) = (Vec::new(), Vec::new());
        let list = |value: &Value| if let Value::Array(values) = value { values.clone() } else { Vec::new() };
        let slot = |value: &Value| match value {
            Value::Int(slot) => u16::try_from(*slot).ok().filter(|slot| *slot < SLOTS),
            _ => None,
        };
        for range in list(answer).into_iter().take(SLOTS.into()) {
            let [first, last, master, replicas @ ..] = &list(&range)[..] else { continue };
            let (Some(first), Some(last)) = (slot(first), slot(last)) else { continue };
            let Some((server, id)) = node(&list(master)) else { continue };
            let replicas = replicas.iter().filter_map(|replica| node(&list(replica)));
            let replicas: Vec<_> = replicas.map(|(server, _)| server).take(MAX_NODES).collect();
            for server in std::iter::once(&server).chain(&replicas) {
                if nodes.len() < MAX_NODES && !nodes.contains(server) {
                    nodes.push(server.clone());
                }
            }
            let ranges = vec![first..=last];
            match masters.iter().position(|master| master.id == id) {
                Some(number) => masters[number].ranges.extend(ranges),
                None if masters.len() >= MAX_NODES => {}
                None => masters.push(Master { id, run_id: String::new(), server, replicas, ranges }),
            }
        }
        // In an order that does not depend on the node that was asked.
        masters.sort_by(|one, other| one.id.cmp(&other.id));
        masters.iter_mut().for_each(|master| master.ranges.sort_by_key(|range| *range.start()));
        Topology { masters, nodes, full: Vec::new() }
    }

    pub(super) fn has_all_slots(&self) -> bool {
        let mut ranges: Vec<_> = self.masters.iter().flat_map(|master| &master.ranges).collect();
        ranges.sort_by_key(|range| *range.start());
        let next = ranges.into_iter().fold(0, |next, range| match *range.start() <= next {
            true => next.max(range.end() + 1),
            false => next,
        });
        next == SLOTS
    }

    /// Checks that there are masters for two copies. Errors: `Unsupported` otherwise; `NoSpace` if all but
    /// one are full.
    pub(super) fn check_masters(&self) -> Result<()> {
        let (count, with_room) = (self.masters.len(), self.with_room().len());
        if with_room >= 2 {
            return Ok(());
        }
        let what = format!(
            "two copies need two masters with slots that are well, and not full; the cluster has {count}, of which {with_room} \
             are not full"
        );
        let kind = if count >= 2 { ErrorKind::NoSpace } else { ErrorKind::Unsupported };
        Err(Error::new(kind, what).with_setting("backing_copies"))
    }

    fn with_room(&self) -> Vec<&Master> {
        self.masters.iter().filter(|master| !self.full.contains(&master.id)).collect()
    }

    /// Returns the home of an extent's next object: slots of two masters, which have room if two have. Other
    /// extents have others. Returns 0 if there are not two masters, each with slots of its own.
    pub(super) fn home(&self, extent: u32) -> u32 {
        let masters = match self.with_room() {
            some if some.len() >= 2 => some,
            _ => self.masters.iter().collect(),
        };
        let count = masters.len();
        if count < 2 {
            return 0;
        }
        let (number, turn) = (extent as usize % count, extent as usize / count);
        let other = (number + 1 + turn % (count - 1)) % count;
        let slot_of = |master: usize| {
            let ranges = &masters[master].ranges;
            let mut at = turn % ranges.iter().map(RangeInclusive::len).sum::<usize>().max(1);
            ranges.iter().find_map(|range| {
                let slot = (at < range.len()).then(|| range.start() + at as u16);
                at = at.saturating_sub(range.len());
                slot
            })
        };
        let home = match (slot_of(number), slot_of(other)) {
            (Some(first), Some(second)) => MARK | u32::from(first) << 14 | u32::from(second),
            _ => 0,
        };
        // A node may say that two masters have a slot.
        if self.check(home).is_ok() { home } else { 0 }
    }

    /// Returns the tag of each master's first slot.
    pub(super) fn first_tags(&self) -> impl Iterator<Item = u32> {
        self.masters.iter().filter_map(|master| tag(*master.ranges.first()?.start()))
    }

    pub(super) fn masters(&self) -> Vec<Server> {
        self.masters.iter().map(|master| master.server.clone()).collect()
    }

    pub(super) fn master_of(&self, slot: u16) -> Option<&Master> {
        self.owner(slot).map(|number| &self.masters[number])
    }

    fn owner(&self, slot: u16) -> Option<usize> {
        self.masters.iter().position(|master| master.ranges.iter().any(|range| range.contains(&slot)))
    }

    /// Checks that different masters have the slots of a home. Errors: `Io` if the copies would be lost
    /// together, or a slot has no master.
    pub(super) fn check(&self, home: u32) -> Result<()> {
        let apart = slots(home).is_some_and(|[first, second]| {
            matches!((self.owner(first), self.owner(second)), (Some(first), Some(second)) if first != second)
        });
        if apart {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Io, "both copies of an extent would lie on one master")
            .with_setting("backing_copies"))
    }
}

fn node(parts: &[Value]) -> Option<(Server, String)> {
    let [host, Value::Int(port), rest @ ..] = parts else { return None };
    let server = Server { host: text(host), port: u16::try_from(*port).ok()? };
    let id = rest.first().map(text).filter(|id| !id.is_empty()).unwrap_or_else(|| server.to_string());
    (!server.host.is_empty()).then_some((server, id))
}

/// Returns the same home, chosen in that epoch.
pub(super) fn in_epoch(home: u32, epoch: u32) -> u32 {
    if home == 0 { 0 } else { home | (epoch % EPOCHS) << EPOCH_SHIFT }
}

/// Returns the epoch in which a home was chosen, below [`EPOCHS`].
pub(super) fn epoch_of(home: u32) -> u32 {
    (home & !MARK) >> EPOCH_SHIFT
}

pub(super) fn slots(home: u32) -> Option<[u16; 2]> {
    (home & MARK != 0).then(|| [home >> 14, home].map(|slot| (slot & u32::from(SLOTS - 1)) as u16))
}

/// Returns the tags of the slots of a home's copies.
pub(super) fn tags(home: u32) -> Option<[u32; 2]> {
    let [first, second] = slots(home)?;
    Some([tag(first)?, tag(second)?])
}

/// Returns the smallest number whose text hashes to a slot.
fn tag(slot: u16) -> Option<u32> {
    static TAGS: OnceLock<HashMap<u16, u32>> = OnceLock::new();
    let tags = TAGS.get_or_init(|| {
        let mut tags = HashMap::with_capacity(SLOTS.into());
        // Far more than it takes.
        for number in 0..10_000_000_u32 {
            tags.entry(slot_of(&number.to_string())).or_insert(number);
            if tags.len() == usize::from(SLOTS) {
                break;
            }
        }
        tags
    });
    tags.get(&slot).copied()
}

/// Returns the slot of a key: the hash of what is in its first braces, or of all of it if nothing is.
pub(super) fn slot_of(key: &str) -> u16 {
    let in_braces = key.split_once('{').and_then(|(_, rest)| rest.split_once('}'));
    let hashed = in_braces.map(|(tag, _)| tag).filter(|tag| !tag.is_empty()).unwrap_or(key);
    crc16(hashed.as_bytes()) % SLOTS
}

/// CRC-16/XMODEM: the polynomial 0x1021, from 0.
fn crc16(bytes: &[u8]) -> u16 {
    const TABLE: [u16; 256] = {
        let (mut table, mut at) = ([0; 256], 0);
        while at < 256 {
            let (mut crc, mut bit) = ((at as u16) << 8, 0);
            while bit < 8 {
                crc = (crc << 1) ^ ((crc >> 15) * 0x1021);
                bit += 1;
            }
            table[at] = crc;
            at += 1;
        }
        table
    };
    bytes.iter().fold(0, |crc, byte| (crc << 8) ^ TABLE[usize::from((crc >> 8) as u8 ^ byte)])
}

pub(super) fn text(value: &Value) -> String {
    match value {
        Value::BulkString(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        Value::SimpleString(text) => text.clone(),
        Value::VerbatimString { text, .. } => text.clone(),
        _ => String::new(),
    }
}

#[cfg(test)]
pub(super) mod tests {
    #![allow(clippy::unwrap_used)]

    use std::collections::HashSet;

    use super::*;

    pub(in crate::redis) fn of(masters: &[&[(i64, i64)]]) -> Topology {
        let ranges = masters.iter().enumerate().flat_map(|(number, ranges)| {
            ranges.iter().map(move |(first, last)| {
                let id = Value::BulkString(format!("id{number}").into_bytes());
                let node =
                    |id| Value::Array(vec![Value::BulkString(b"127.0.0.1".to_vec()), Value::Int(7000), id]);
                let replica = node(Value::BulkString(b"replica".to_vec()));
                Value::Array(vec![Value::Int(*first), Value::Int(*last), node(id), replica])
            })
        });
        Topology::parse(&Value::Array(ranges.collect()))
    }

    #[test]
    fn each_slot_has_a_tag() {
        for slot in 0..SLOTS {
            let tag = tag(slot).unwrap();
            assert_eq!(slot_of(&format!("uzram:0:{{{tag}}}:1:2")), slot);
        }
        assert_eq!(tag(SLOTS), None);
    }

    /// The examples of the Redis Cluster Specification.
    #[test]
    fn a_key_has_the_slot_that_the_specification_says() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
        assert_eq!(slot_of("123456789"), 0x31c3 % SLOTS);
        assert_eq!(slot_of("{user1000}.following"), slot_of("user1000"));
        assert_eq!(slot_of("foo{}{bar}"), crc16(b"foo{}{bar}") % SLOTS);
        assert_eq!(slot_of("foo{{bar}}zap"), slot_of("{bar"));
        assert_eq!(slot_of("foo{bar}{zap}"), slot_of("bar"));
        assert_eq!(slot_of("foo{bar"), crc16(b"foo{bar") % SLOTS);
    }

    #[test]
    fn a_single_server_has_all_slots() {
        let server = Server { host: "a".to_owned(), port: 1 };
        let topology = Topology::of_server(server.clone());
        assert_eq!(topology.masters(), [server]);
        assert!((0..SLOTS).all(|slot| topology.master_of(slot).is_some()));
    }

    #[test]
    fn copies_lie_on_different_masters() {
        for topology in [
            of(&[&[(0, 5460)], &[(5461, 10922)], &[(10923, 16383)]]),
            of(&[&[(0, 1), (3, 3), (16000, 16383)], &[(2, 2)]]),
            of(&[&[(0, 100)], &[(101, 101)], &[(102, 200)], &[(201, 16383)], &[]]),
        ] {
            let mut homes = HashSet::new();
            for extent in 0..2000 {
                let home = topology.home(extent);
                topology.check(home).unwrap();
                assert!(tags(home).is_some());
                homes.insert(home);
            }
            assert!(homes.len() > 100 || topology.masters.len() == 2, "{}", homes.len());
            topology.check_masters().unwrap();
        }
    }

    #[test]
    fn masters_that_are_full_get_nothing_new() {
        let mut topology = of(&[&[(0, 5000)], &[(5001, 10000)], &[(10001, 16383)]]);
        let before: Vec<u32> = (0..300).map(|extent| topology.home(extent)).collect();
        topology.full.push("id1".to_owned());
        topology.check_masters().unwrap();
        for extent in 0..300 {
            let slots = slots(topology.home(extent)).unwrap();
            assert!(slots.into_iter().all(|slot| topology.master_of(slot).unwrap().id != "id1"), "{slots:?}");
        }
        // What is there is as well as before.
        assert!(before.iter().all(|home| topology.check(*home).is_ok()));
        topology.full.push("id0".to_owned());
        assert_eq!(topology.check_masters().map_err(|error| error.kind()), Err(ErrorKind::NoSpace));
        // A lease is somewhere.
        topology.check(topology.home(0)).unwrap();
    }

    #[test]
    fn slots_without_a_master_are_noticed() {
        assert!(of(&[&[(0, 8191)], &[(8192, 16383)]]).has_all_slots());
        assert!(of(&[&[(5, 5), (0, 4), (16383, 16383)], &[(6, 16382)]]).has_all_slots());
        for masters in [
            &[&[(0, 8190)][..], &[(8192, 16383)]][..],
            &[&[(1, 16383)]],
            &[&[(0, 16382)]],
            &[&[(0, 3), (5, 16383)], &[(1, 2)]],
            &[],
        ] {
            assert!(!of(masters).has_all_slots(), "{masters:?}");
        }
        assert!(Topology::of_server(Server { host: "a".to_owned(), port: 1 }).has_all_slots());
    }

    #[test]
    fn a_long_answer_is_cut() {
        let node = |number: i64| {
            let id = Value::BulkString(number.to_string().into_bytes());
            Value::Array(vec![Value::BulkString(b"a".to_vec()), Value::Int(1 + number), id])
        };
        let range = |number| Value::Array(vec![Value::Int(0), Value::Int(0), node(number)]);
        let topology = Topology::parse(&Value::Array((0..20_000).map(range).collect()));
        assert_eq!((topology.masters.len(), topology.nodes.len()), (MAX_NODES, MAX_NODES));
        let topology = Topology::parse(&Value::Array((0..20_000).map(|_| range(0)).collect()));
        assert_eq!((topology.masters[0].ranges.len(), topology.nodes.len()), (SLOTS.into(), 1));
        let replicas: Vec<_> =
            [Value::Int(0), Value::Int(0)].into_iter().chain((0..3000).map(node)).collect();
        let topology = Topology::parse(&Value::Array(vec![Value::Array(replicas)]));
        assert_eq!((topology.masters[0].replicas.len(), topology.nodes.len()), (MAX_NODES, MAX_NODES));
    }

    #[test]
    fn too_few_masters_and_slots_that_moved_are_noticed() {
        let one = of(&[&[(0, 16383)]]);
        assert!(one.check_masters().is_err());
        assert_eq!(one.home(7), 0);
        assert!(one.check(0).is_err());
        let two = of(&[&[(0, 8191)], &[(8192, 16383)]]);
        let home = two.home(7);
        two.check(home).unwrap();
        assert!(one.check(home).is_err());
        // A slot that nobody has.
        assert!(of(&[&[(0, 10)], &[(16000, 16383)]]).check(home).is_err());
        assert_eq!(tags(0), None);
        // Other answers are no topology.
        for answer in
            [Value::Nil, Value::Int(1), Value::Array(vec![Value::Nil, Value::Array(vec![Value::Int(-1)])])]
        {
            assert_eq!(Topology::parse(&answer), Topology::default());
        }
    }
}
