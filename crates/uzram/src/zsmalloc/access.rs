//! Reports accesses to objects' bytes to loom, which does not model the memory that they lie in.

use crate::base::sync::Access;

use super::word::Location;

/// Reports accesses to objects' bytes, by location, in models; otherwise empty.
pub(super) struct ObjectAccess(Box<[Access]>);

impl ObjectAccess {
    /// The most objects of a page: models store large ones.
    const OBJECTS: usize = 4;

    pub(super) fn new(pages: usize) -> Self {
        let places = if cfg!(loom) { pages * Self::OBJECTS } else { 0 };
        ObjectAccess((0..places).map(|_| Access::default()).collect())
    }

    #[inline]
    pub(super) fn read(&self, object: Location) {
        if cfg!(loom) {
            self.place(object).read();
        }
    }

    #[inline]
    pub(super) fn write(&self, object: Location) {
        if cfg!(loom) {
            self.place(object).write();
        }
    }

    fn place(&self, object: Location) -> &Access {
        assert!(usize::from(object.index) < Self::OBJECTS, "models store large objects");
        &self.0[object.page as usize * Self::OBJECTS + usize::from(object.index)]
    }
}
