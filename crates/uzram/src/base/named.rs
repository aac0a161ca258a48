//! Types whose values have names in settings, and hints for unknown names.

/// Implements `Display` and `FromStr` by the `name()` of each of a type's `ALL`. `$refusal` is the message
/// for an unknown name; it takes that name and the list of valid ones. `$alias` is another name, which is
/// only parsed.
macro_rules! named {
    ($type:ident, $refusal:literal $(, $alias:literal = $value:expr)*) => {
        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }

        impl std::str::FromStr for $type {
            type Err = $crate::base::error::Error;

            fn from_str(name: &str) -> $crate::base::error::Result<Self> {
                $(
                    if name == $alias {
                        return Ok($value);
                    }
                )*
                $type::ALL.into_iter().find(|one| one.name() == name).ok_or_else(|| {
                    let names = $type::ALL.map($type::name).join(", ");
                    $crate::base::error::Error::invalid(format!($refusal, name, names))
                })
            }
        }
    };
}

pub(crate) use named;

/// Generates from a list of designs: `$design`, an enum of them with names, whose default is the first;
/// `$any`, an enum of a `$of` of each; and functions of `$any` that call the function of the same name of
/// that `$of`.
#[cfg(feature = "designs")]
macro_rules! any_design {
    (
        $designs:tt $design:ident, $refusal:literal, $any:ident of $of:ident;
        fn new($($arg:ident: $type:ty),*);
        $($(#[$attr:meta])* fn $name:ident(&self $(, $param:ident: $param_type:ty)*) $(-> $out:ty)?;)*
    ) => {
        $crate::base::named::any_design!(
            @enums $design, $refusal, $any, $of, $designs, $($arg: $type,)* => ($($arg),*)
        );

        impl $any {
            $(
                $(#[$attr])*
                #[inline]
                pub fn $name(&self $(, $param: $param_type)*) $(-> $out)? {
                    $crate::base::named::any_design!(@each $any $designs, self, it => it.$name($($param),*))
                }
            )*
        }
    };
    (
        @enums $design:ident, $refusal:literal, $any:ident, $of:ident, [$default:ident $(, $other:ident)*],
        $($arg:ident: $type:ty,)* => $args:tt
    ) => {
        /// A lock design, chosen at run time.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub enum $design {
            #[doc = concat!("[`", stringify!($default), "`].")]
            #[default]
            $default,
            $(#[doc = concat!("[`", stringify!($other), "`].")] $other,)*
        }

        impl $design {
            /// All of them.
            pub const ALL: [$design; 1 + [$(stringify!($other)),*].len()] =
                [$design::$default $(, $design::$other)*];

            /// Returns its name in settings.
            pub const fn name(self) -> &'static str {
                match self {
                    $design::$default => $default::NAME,
                    $($design::$other => $other::NAME,)*
                }
            }
        }

        $crate::base::named::named!($design, $refusal);

        pub(crate) enum $any {
            $default($of<$default>),
            $($other($of<$other>),)*
        }

        impl $any {
            pub fn new(design: $design, $($arg: $type),*) -> $crate::base::error::Result<Self> {
                match design {
                    $design::$default => $of::new $args.map($any::$default),
                    $($design::$other => $of::new $args.map($any::$other),)*
                }
            }
        }
    };
    (@each $any:ident [$($design:ident),*], $value:expr, $it:ident => $then:expr) => {
        match $value {
            $($any::$design($it) => $then,)*
        }
    };
}

#[cfg(feature = "designs")]
pub(crate) use any_design;

/// The longest name that is compared with others.
const MAX_NAME_BYTES: usize = 64;

/// Returns the one of `names` that `name` was probably meant to be: the nearest by edit distance, if that is
/// at most a third of the length. Names that differ only in digits name different things and are left out.
pub fn nearest<'a>(name: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if name.len() > MAX_NAME_BYTES {
        return None;
    }
    let without_digits = |name: &str| name.replace(|c: char| c.is_ascii_digit(), "");
    let wanted = without_digits(name);
    let others = names.into_iter().filter(|other| without_digits(other) != wanted);
    let near = others
        .map(|other| (strsim::osa_distance(name, other), other))
        .filter(|(changes, _)| *changes <= name.len() / 3);
    near.min_by_key(|(changes, _)| *changes).map(|(_, other)| other)
}

/// Returns a hint for a message about an unknown name: the one probably meant, else the list of names.
pub fn hint(name: &str, names: &[&str]) -> String {
    match nearest(name, names.iter().copied()) {
        Some(other) => format!("did you mean `{other}`?"),
        None => format!("there are: {}", names.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_that_was_meant_is_found() {
        let names = ["mem_limit", "mem_fixed", "reset", "size", "zram0", "a"];
        for (name, meant) in [
            ("mem_limt", Some("mem_limit")),
            ("mem-limit", Some("mem_limit")),
            ("sizze", Some("size")),
            ("zrma0", Some("zram0")),
            ("zrm0", Some("zram0")),
            ("zram7", None),
            ("b", None),
            ("", None),
            ("checksum", None),
        ] {
            assert_eq!(nearest(name, names), meant, "{name}");
        }
        assert_eq!(nearest(&"a".repeat(1 << 20), names), None);
        assert_eq!(hint("rest", &names), "did you mean `reset`?");
        assert_eq!(hint("none", &["a", "b"]), "there are: a, b");
    }
}
