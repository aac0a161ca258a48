//! Reports accesses to objects' bytes to loom, which does not model the memory that they lie in.

use crate::base::sync::Access;

use super::word::Location;

/// Reports accesses to objects' bytes to loom, by location; otherwise empty.
pub(super) struct ObjectAccess {
    #[cfg(loom)]
    places: Box<[Access]>,
    #[cfg(not(loom))]
    _places: Access,
}

#[cfg(loom)]
impl ObjectAccess {
    /// The most objects of a page: models store large ones.
    const OBJECTS: usize = 4;

    pub(super) fn new(pages: usize) -> Self {
        ObjectAccess { places: (0..pages * Self::OBJECTS).map(|_| Access::default()).collect() }
    }

    fn place(&self, object: Location) -> &Access {
        assert!(usize::from(object.index) < Self::OBJECTS, "models store large objects");
        &self.places[object.page as usize * Self::OBJECTS + usize::from(object.index)]
    }

    pub(super) fn read(&self, object: Location) {
        self.place(object).read();
    }

    pub(super) fn write(&self, object: Location) {
        self.place(object).write();
    }
}

#[cfg(not(loom))]
impl ObjectAccess {
    pub(super) fn new(_: usize) -> Self {
        ObjectAccess { _places: Access::default() }
    }

    #[inline]
    pub(super) fn read(&self, _: Location) {}

    #[inline]
    pub(super) fn write(&self, _: Location) {}
}
