use super::*;

#[test]
fn every_side_has_an_owner() {
    let designs = designs();
    for name in designs.all() {
        let (owner, phases) = owner(&name).unwrap();
        assert_eq!(phases.last(), Some(&Phase::Unmap), "{name}: {owner:?}");
    }
    assert!(owner("nobody").is_err());
    assert_eq!(owner(KERNEL_LZO).unwrap().0, Owner::Kernel("lzo-rle"));
    // The author's figures are those of the series.
    let at = designs.before.iter().position(|name| *name == pool(PoolDesign::Split)).unwrap();
    assert_eq!(SERIES.published_at(CASE, 4, at).unwrap().after.figure, "45.3 ms");
    assert!(SERIES.published_at(CASE, 3, at).is_none());
}
