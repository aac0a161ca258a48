//! Building a device with its parameters in one expression. Each parameter is checked like its attribute.

use std::fmt::Display;

use crate::base::error::{Error, Result};
use crate::base::sync::Arc;
use crate::codec::Algorithm;
use crate::store::MAX_RECOMPRESSION;

use super::{Attribute, Device, NamedBacking};

/// Builds a [`Device`]; created by [`Device::builder`].
#[derive(Clone)]
#[must_use = "a builder does nothing until `build`"]
pub struct DeviceBuilder {
    name: String,
    algorithm: Option<Algorithm>,
    /// Recompression algorithms by priority; the first has priority 1.
    recompression: Vec<Algorithm>,
    backing: Option<NamedBacking>,
    attributes: Vec<(&'static str, String)>,
}

impl Device {
    /// Creates a builder for a device of that name: 1 to 64 letters, digits, `-`, `_` and `.`, not starting
    /// with a dot.
    pub fn builder(name: impl Into<String>) -> DeviceBuilder {
        DeviceBuilder {
            name: name.into(),
            algorithm: None,
            recompression: Vec::new(),
            backing: None,
            attributes: Vec::new(),
        }
    }
}

impl DeviceBuilder {
    /// Sets the compression algorithm: an [`Algorithm`], or a [`Kind`](crate::codec::Kind) at its default
    /// level. The default is lz4.
    pub fn algorithm(mut self, algorithm: impl Into<Algorithm>) -> Self {
        self.algorithm = Some(algorithm.into());
        self
    }

    /// Adds a recompression algorithm for cold pages, with the next priority.
    pub fn recompress_with(mut self, algorithm: impl Into<Algorithm>) -> Self {
        self.recompression.push(algorithm.into());
        self
    }

    /// Sets the memory limit of the device. The default is no limit.
    pub fn mem_limit_bytes(self, bytes: u64) -> Self {
        self.attribute("mem_limit", bytes)
    }

    /// Sets the backing device that cold pages are written back to.
    pub fn backing(mut self, backing: NamedBacking) -> Self {
        self.backing = Some(backing);
        self
    }

    /// Sets any other attribute that can be set before initialisation: see [`Device::attributes`].
    pub fn attribute(mut self, name: &'static str, value: impl Display) -> Self {
        self.attributes.push((name, value.to_string()));
        self
    }

    /// Builds the device, with a disk of `size_bytes` bytes, rounded up to whole pages.
    /// Fails with `Invalid` for an invalid name or value; `NoMemory` when the system gives none.
    pub fn build(mut self, size_bytes: u64) -> Result<Arc<Device>> {
        let device = Device::new(&self.name)?;
        if self.recompression.len() > MAX_RECOMPRESSION {
            let what = format!("a device can have at most {MAX_RECOMPRESSION} recompression algorithms");
            return Err(Error::invalid(what).with_setting("recomp_algorithm"));
        }
        {
            let config = &mut device.state.lock().params.store;
            if let Some(algorithm) = self.algorithm {
                config.algorithm = algorithm;
            }
            for (place, algorithm) in config.recompression.iter_mut().zip(self.recompression) {
                *place = Some(algorithm);
            }
        }
        device.set_backing(self.backing)?;
        self.attributes.sort_by_key(|(name, _)| Attribute::turn(name));
        for (name, value) in &self.attributes {
            device.set(name, value)?;
        }
        device.set("disksize", &size_bytes.to_string())?;
        Ok(device)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::base::error::ErrorKind;
    use crate::codec::Kind;

    #[test]
    fn attributes_are_set_in_their_turn() {
        let device = Device::builder("zram0")
            .attribute("algorithm_params", "level=5")
            .attribute("comp_algorithm", "zstd")
            .build(1 << 20)
            .unwrap();
        assert!(device.get("comp_algorithm").unwrap().contains("[zstd:5]"));
    }

    #[test]
    fn a_device_is_built_with_its_attributes() {
        let device = Device::builder("zram0")
            .algorithm(Algorithm::new(Kind::Zstd, Some(3), None).unwrap())
            .recompress_with(Kind::Deflate)
            .mem_limit_bytes(8 << 20)
            .attribute("checksum", 1)
            .attribute("policy_high", 60)
            .attribute("policy_low", 40)
            .attribute("recompress_after", 90)
            .attribute("lru_enable", 0)
            .attribute("compact_threshold", 30)
            .build((16 << 20) - 1)
            .unwrap();
        assert_eq!((device.name(), device.size_bytes()), ("zram0", 16 << 20));
        for (name, value) in [
            ("mem_limit", "8388608"),
            ("checksum", "1"),
            ("policy_high", "60"),
            ("policy_low", "40"),
            ("lru_enable", "0"),
            ("compact_threshold", "30"),
        ] {
            assert_eq!(device.get(name).unwrap(), value, "{name}");
        }
        assert!(device.get("comp_algorithm").unwrap().contains("[zstd"));
        assert!(device.get("recomp_algorithm").unwrap().contains("#1: lz4 lz4hc zstd [deflate]"));
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let refusal = |builder: DeviceBuilder| {
            let error = builder.build(1 << 20).map(|_| ()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            error.setting()
        };
        let begin = || Device::builder("zram0");
        assert_eq!(refusal(Device::builder("a/b")), None);
        assert_eq!(refusal(begin().attribute("policy_low", 96)), Some("policy_high"));
        let many = (0..=MAX_RECOMPRESSION).fold(begin(), |builder, _| builder.recompress_with(Kind::Zstd));
        assert_eq!(refusal(many), Some("recomp_algorithm"));
        assert!(begin().build(0).is_err());
    }
}
