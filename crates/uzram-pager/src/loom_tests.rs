//! The protocol of a unit's state: a program that touches it, evictors, and a thread that discards it.
//!
//! The contents are modelled by two numbers: what the program sees, if the page is open, and what the store has.

use loom::sync::Mutex;
use uzram::sync::Arc;

use crate::state::{Place, State, Touched};
