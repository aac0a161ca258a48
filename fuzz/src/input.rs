//! An input as a sequence of choices. It never runs out: past its end every choice is 0.

use uzram::machine_memory::Memory;
use uzram::random::Random;

pub(crate) struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Input(bytes)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn byte(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    pub fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[usize::from(self.byte()) % choices.len()]
    }

    /// Returns the next `len` bytes, or as many as are left.
    pub fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (head, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        head
    }

    pub fn rest(self) -> &'a [u8] {
        self.0
    }

    /// Calls `step` until the input ends, at most `most` times.
    pub fn each(&mut self, most: usize, mut step: impl FnMut(&mut Self)) {
        for _ in 0..most {
            if self.is_empty() {
                break;
            }
            step(self);
        }
    }

    /// Returns the machine that the first bytes of an input describe.
    pub fn machine(&mut self) -> Memory {
        Memory { ram_bytes: self.u64(), limit_bytes: self.u32().into() }
    }

    pub fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let head = self.bytes(N);
        array[..head.len()].copy_from_slice(head);
        array
    }

    /// Returns `len` bytes of contents, of a kind that compressed memory treats specially: one word repeated,
    /// a short period, noise, or noise and then zeros; or the input's own bytes.
    pub fn contents(&mut self, len: usize) -> Vec<u8> {
        let mut contents = vec![0; len];
        match self.byte() % 5 {
            0 => {
                let word = u64::from(self.byte()).wrapping_mul(0x0101_0101_0101_0101).to_le_bytes();
                repeat(&mut contents, &word);
            }
            1 => {
                let period_bytes = 1 + usize::from(self.byte() % 64);
                let period = self.bytes(period_bytes);
                repeat(&mut contents, period);
            }
            2 => Random::new(u64::from(self.byte())).fill(&mut contents),
            3 => {
                let noise_bytes = usize::from(self.u16()).min(len);
                Random::new(u64::from(self.byte())).fill(&mut contents[..noise_bytes]);
            }
            _ => {
                let own_bytes = usize::from(self.byte()).min(len);
                let own = self.bytes(own_bytes);
                contents[..own.len()].copy_from_slice(own);
            }
        }
        contents
    }
}

/// Returns an input that describes a machine with 16 GiB and a limit of 2 GiB, and goes on with a text.
pub(crate) fn on_a_machine(text: &str) -> Vec<u8> {
    [&(16u64 << 30).to_le_bytes()[..], &(2u32 << 30).to_le_bytes(), text.as_bytes()].concat()
}

/// Fills `out` with repetitions of `period`; does nothing if that is empty. By doubling: under the fuzzers, a
/// loop over bytes would take longer than the use of them.
fn repeat(out: &mut [u8], period: &[u8]) {
    let mut filled = period.len().min(out.len());
    out[..filled].copy_from_slice(&period[..filled]);
    while 0 < filled && filled < out.len() {
        let more = filled.min(out.len() - filled);
        out.copy_within(..more, filled);
        filled += more;
    }
}
