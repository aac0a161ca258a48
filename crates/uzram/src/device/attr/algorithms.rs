//! The attributes of compression algorithms and their parameters.

use crate::base::error::{Error, Result};
use crate::codec::{Algorithm, Dictionary, Kind};
use crate::store::MAX_RECOMPRESSION;

use super::super::{Device, Params};
use super::{Reading, Value, number_within, put, refused, words};

/// Lists all algorithms, with the one in use in brackets.
fn choices(current: &Algorithm) -> String {
    let show = |kind: Kind| if kind == current.kind() { format!("[{current}]") } else { kind.name().into() };
    Kind::ALL.map(show).join(" ")
}

pub(super) fn comp_algorithm(device: &Device) -> Reading {
    choices(&device.state.lock().params.store.algorithm).into()
}

pub(super) fn recomp_algorithm(device: &Device) -> Reading {
    let algorithms = device.state.lock().params.store.recompression.clone();
    let shown: Vec<_> = (1..)
        .zip(&algorithms)
        .filter_map(|(priority, algorithm)| Some((priority, choices(algorithm.as_ref()?))))
        .collect();
    let lines: Vec<_> = shown.iter().map(|(priority, choices)| format!("#{priority}: {choices}")).collect();
    let fields = |(priority, choices)| {
        Value::Fields(vec![("priority", Value::Number(priority)), ("algorithm", Value::Text(choices))])
    };
    Reading { text: lines.join("\n"), value: Value::List(shown.into_iter().map(fields).collect()) }
}

/// Parses an algorithm, by `parse`, or `none`, and its priority.
pub(super) fn parse_recomp_algorithm<T>(
    value: &str,
    parse: impl Fn(&str) -> Result<T>,
) -> Result<(Option<T>, usize)> {
    let (mut algorithm, mut priority) = (None, 1);
    for (name, value) in words(value) {
        match name {
            "algo" if value == "none" => algorithm = Some(None),
            "algo" if !value.is_empty() => algorithm = Some(Some(parse(value)?)),
            "priority" => priority = parse_priority(value, 1)?,
            _ => return refused("recomp_algorithm", format!("'{name}' is not algo=ALGORITHM or priority=N")),
        }
    }
    match algorithm {
        Some(algorithm) => Ok((algorithm, priority)),
        None => refused("recomp_algorithm", "algo=ALGORITHM is missing"),
    }
}

pub(super) fn parse_priority(text: &str, least: usize) -> Result<usize> {
    number_within("priority", text, least..=MAX_RECOMPRESSION)
}

/// Finds the first algorithm of that priority and kind, each if given. Returns its priority, too.
pub(super) fn find(
    params: &Params,
    priority: Option<usize>,
    kind: Option<Kind>,
) -> Result<(usize, Algorithm)> {
    let all = [Some(&params.store.algorithm)]
        .into_iter()
        .chain(params.store.recompression.iter().map(Option::as_ref));
    let is_wanted = |(at, algorithm): &(usize, &Algorithm)| {
        priority.is_none_or(|priority| priority == *at) && kind.is_none_or(|kind| kind == algorithm.kind())
    };
    let found = all.enumerate().filter_map(|(at, algorithm)| Some((at, algorithm?))).find(is_wanted);
    let Some((at, algorithm)) = found else {
        let of_kind = kind.map_or_else(String::new, |kind| format!(" {}", kind.name()));
        let at = priority.map_or_else(String::new, |priority| format!(" with priority {priority}"));
        let setting = if priority == Some(0) { "comp_algorithm" } else { "recomp_algorithm" };
        return refused(setting, format!("the device has no algorithm{of_kind}{at}"));
    };
    Ok((at, algorithm.clone()))
}

#[derive(Default)]
pub(super) struct AlgorithmParams {
    kind: Option<Kind>,
    priority: Option<usize>,
    level: Option<String>,
    dict: Option<String>,
}

impl AlgorithmParams {
    /// Parses the kernel's syntax, but refuses what the kernel ignores.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let mut params = AlgorithmParams::default();
        for (name, value) in words(text) {
            match name {
                _ if value.is_empty() => return Err(unknown(name)),
                "algo" => params.kind = Some(value.parse()?),
                "priority" => params.priority = Some(parse_priority(value, 0)?),
                "level" => params.level = Some(value.to_owned()),
                "dict" => {
                    Dictionary::check_path(value)?;
                    params.dict = Some(value.to_owned());
                }
                "deflate.winbits" => {
                    return Err(Error::invalid(format!(
                        "'{name}={value}': deflate's window cannot be changed; leave it out"
                    )));
                }
                _ => return Err(unknown(name)),
            }
        }
        if let (Some(kind), Some(level)) = (params.kind, &params.level) {
            kind.parse_level(level)?;
        }
        Ok(params)
    }
}

pub(super) fn set_algorithm_params(device: &Device, params: AlgorithmParams) -> Result<()> {
    let AlgorithmParams { kind, priority, level, dict } = params;
    // The default is the algorithm in use.
    let priority = priority.or(if kind.is_none() { Some(0) } else { None });
    let (at, current) = {
        let state = device.state.lock();
        state.uninitialised("algorithm_params")?;
        find(&state.params, priority, kind)?
    };
    // Without the device's lock: it reads a file.
    let level = level.map(|level| current.kind().parse_level(&level)).transpose()?;
    let dict = dict.map(|path| Dictionary::read(&path)).transpose()?;
    let algorithm = Algorithm::new(current.kind(), level, dict)?;
    put("algorithm_params", device, algorithm, |params, algorithm| match at.checked_sub(1) {
        None => params.store.algorithm = algorithm,
        Some(at) => params.store.recompression[at] = Some(algorithm),
    })
}

fn unknown(name: &str) -> Error {
    Error::invalid(format!("'{name}' is not algo=NAME, priority=N, level=N or dict=PATH"))
}
