//! Tests of the whole crate from outside, in one program.

#![allow(clippy::unwrap_used)]

#[path = "../../../uzram/tests/it/alone.rs"]
mod alone;
mod attack_memory;
mod attack_nbd;
mod attack_tls;
mod common;
mod nbd_clients;
mod nbd_contexts;
mod nbd_descriptors;
mod nbd_end;
mod nbd_extended;
mod nbd_faults;
mod nbd_garbage;
mod nbd_hostile;
mod nbd_idle;
mod nbd_protocol;
mod nbd_requests;
mod nbd_server;
mod nbd_tls;
mod nbd_waiting;
mod own_devices;
