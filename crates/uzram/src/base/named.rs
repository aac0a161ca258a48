//! Types whose values have names in settings.

/// Has a type read and print as the `name()` of one of its `ALL`. `$refusal` takes another name, and those there are.
macro_rules! named {
    ($type:ident, $refusal:literal) => {
        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }

        impl std::str::FromStr for $type {
            type Err = $crate::base::error::Error;

            fn from_str(name: &str) -> $crate::base::error::Result<Self> {
                $type::ALL.into_iter().find(|one| one.name() == name).ok_or_else(|| {
                    let names = $type::ALL.map($type::name).join(", ");
                    $crate::base::error::Error::invalid(format!($refusal, name, names))
                })
            }
        }
    };
}

pub(crate) use named;
