//! The figures of the patch's author: all those of its message.
//!
//! Sergey Senozhatsky, "zram: user per-cpu compression streams", merged in May 2016 (Linux 4.7). The machine:
//! x86-64, 4 CPUs, a zram disk of 3 GiB with lzo, fio. Rates are as fio printed them, KB being 1024 bytes and
//! MB 1024 KB (kb_base of fio 2); they are converted to 10^6 bytes a second beside ours.

use std::collections::BTreeMap;

use crate::experiment::{Published, PublishedSide};
use uzram_bench::engine::Pattern;

/// Numbers of jobs, from 1 on.
pub(super) const JOBS: usize = 10;
/// Columns of each table.
const DESIGNS: usize = 3;
const DESIGN_NAMES: [&str; DESIGNS] = ["4 streams", "8 streams", "per-cpu"];
const PER_CPU: usize = 2;

/// perf's names of its counters.
const COUNTERS: [&str; 5] =
    ["stalled_cycles_frontend", "stalled_cycles_backend", "instructions", "branches", "branch_misses"];

/// Converts fio's KB/s to its MB/s.
const fn kb(kb_per_s: f64) -> f64 {
    kb_per_s / 1024.0
}

/// 10^6 bytes in fio's MB.
const MB: f64 = (1u64 << 20) as f64 / 1e6;

/// fio's rates by number of jobs, 1 first: the lines are reads of `read` and `randread`, writes of
/// `write` and `randwrite`, reads and writes of `rw`, reads and writes of `randrw`; the columns 4
/// streams, 8 streams, per-cpu.
#[rustfmt::skip]
const RATES_MB_PER_S: [[[f64; DESIGNS]; 8]; JOBS] = [
    [
        [2520.1, 2566.5, 2491.5],
        [2102.7, 2104.2, 2091.3],
        [1355.1, 1320.2, 1378.9],
        [1103.5, 1097.2, 1122.5],
        [kb(434_013.0), kb(435_153.0), kb(439_961.0)],
        [kb(433_969.0), kb(435_109.0), kb(439_917.0)],
        [kb(403_166.0), kb(405_139.0), kb(403_373.0)],
        [kb(403_223.0), kb(405_197.0), kb(403_430.0)],
    ],
    [
        [7958.6, 8105.6, 8073.7],
        [6864.9, 6989.8, 7021.8],
        [2438.1, 2346.9, 3400.2],
        [1994.2, 1990.3, 2941.2],
        [kb(981_504.0), kb(973_906.0), 1018.8],
        [kb(981_659.0), kb(974_060.0), 1018.1],
        [kb(937_021.0), kb(938_976.0), kb(987_250.0)],
        [kb(934_878.0), kb(936_830.0), kb(984_993.0)],
    ],
    [
        [13280.0, 13553.0, 13553.0],
        [11534.0, 11785.0, 11755.0],
        [3456.9, 3469.9, 4810.3],
        [3029.6, 3031.6, 4264.8],
        [1363.8, 1362.6, 1448.9],
        [1361.9, 1360.7, 1446.9],
        [1309.4, 1310.6, 1397.5],
        [1307.4, 1308.5, 1395.3],
    ],
    [
        [20244.0, 20177.0, 20344.0],
        [17886.0, 17913.0, 17835.0],
        [4071.6, 4046.1, 6370.2],
        [3608.9, 3576.3, 5785.4],
        [1824.3, 1821.6, 1997.5],
        [1819.8, 1817.4, 1992.5],
        [1765.7, 1768.3, 1937.3],
        [1767.5, 1769.1, 1939.2],
    ],
    [
        [18663.0, 18986.0, 18823.0],
        [16659.0, 16605.0, 16954.0],
        [3912.4, 3888.7, 6126.9],
        [3506.4, 3442.5, 5519.3],
        [1798.2, 1746.5, 1935.8],
        [1792.7, 1740.7, 1929.1],
        [1727.6, 1658.2, 1917.3],
        [1726.5, 1657.2, 1916.6],
    ],
    [
        [21017.0, 20922.0, 21162.0],
        [19022.0, 19140.0, 18770.0],
        [3968.2, 4037.7, 6620.8],
        [3643.5, 3590.2, 6027.5],
        [1871.8, 1880.5, 2049.9],
        [1867.8, 1877.2, 2046.2],
        [1755.8, 1710.3, 1964.7],
        [1750.5, 1705.9, 1958.8],
    ],
    [
        [21103.0, 20677.0, 21482.0],
        [18522.0, 18379.0, 19443.0],
        [4022.5, 4067.4, 6755.9],
        [3691.7, 3695.5, 5925.6],
        [1841.5, 1933.9, 2090.5],
        [1842.7, 1935.3, 2091.9],
        [1832.4, 1856.4, 1971.5],
        [1822.3, 1846.2, 1960.6],
    ],
    [
        [20463.0, 20194.0, 20862.0],
        [18178.0, 17978.0, 18299.0],
        [4085.9, 4060.2, 7023.8],
        [3776.3, 3737.9, 6278.2],
        [1957.6, 1944.4, 2109.5],
        [1959.2, 1946.2, 2111.4],
        [1900.6, 1885.7, 2082.1],
        [1896.2, 1881.4, 2078.3],
    ],
    [
        [19692.0, 19734.0, 19334.0],
        [17678.0, 18249.0, 17666.0],
        [4004.7, 4064.8, 6990.7],
        [3724.7, 3772.1, 6193.6],
        [1953.7, 1967.3, 2105.6],
        [1953.4, 1966.7, 2104.1],
        [1860.4, 1897.4, 2068.5],
        [1858.9, 1895.9, 2066.8],
    ],
    [
        [19730.0, 19579.0, 19492.0],
        [18028.0, 18018.0, 18221.0],
        [4027.3, 4090.6, 7020.1],
        [3810.5, 3846.8, 6426.8],
        [1956.1, 1994.6, 2145.2],
        [1955.9, 1993.5, 2144.8],
        [1852.8, 1911.6, 2075.8],
        [1855.7, 1914.6, 2078.1],
    ],
];

/// perf stat's counts by number of jobs, 1 first, all six patterns together: the lines are [`COUNTERS`], the
/// columns 4 streams, 8 streams, per-cpu.
#[rustfmt::skip]
const COUNTS: [[[u64; DESIGNS]; COUNTERS.len()]; JOBS] = [
    [
        [23_174_811_209, 23_220_254_188, 23_061_406_918],
        [11_514_174_638, 11_696_722_657, 11_370_852_810],
        [73_925_005_782, 73_903_177_632, 73_507_201_037],
        [14_455_124_835, 14_455_184_779, 14_378_599_509],
        [69_801_336, 80_225_529, 72_044_726],
    ],
    [
        [49_912_741_782, 50_101_189_290, 32_874_195_633],
        [27_080_366_230, 27_949_970_232, 16_461_222_706],
        [122_831_629_690, 122_919_846_419, 121_924_786_775],
        [23_725_889_239, 23_733_547_140, 23_553_950_311],
        [90_733_041, 96_320_895, 84_561_092],
    ],
    [
        [66_437_834_608, 63_534_923_344, 42_101_478_505],
        [34_940_799_661, 34_774_043_148, 21_163_324_388],
        [171_692_121_862, 171_775_373_044, 170_353_542_261],
        [32_968_962_622, 32_987_739_894, 32_729_463_918],
        [111_522_732, 110_472_894, 99_791_291],
    ],
    [
        [98_741_701_675, 94_797_349_965, 54_535_655_381],
        [54_642_609_615, 55_233_554_408, 27_882_323_541],
        [220_884_807_851, 220_930_887_273, 218_926_845_851],
        [42_354_518_180, 42_362_770_587, 41_955_552_870],
        [138_093_449, 131_295_286, 121_794_771],
    ],
    [
        [116_219_747_212, 110_310_397_012, 66_373_082_723],
        [66_325_434_776, 64_157_087_914, 32_999_097_299],
        [270_615_008_466, 270_546_409_525, 268_439_910_948],
        [51_834_046_557, 51_811_867_722, 51_412_576_077],
        [158_197_086, 142_639_805, 133_425_455],
    ],
    [
        [138_009_414_492, 139_063_571_254, 75_278_568_278],
        [79_211_949_650, 79_077_241_028, 37_735_797_899],
        [319_763_993_731, 319_937_782_834, 316_663_600_784],
        [61_219_433_294, 61_250_355_540, 60_523_446_617],
        [169_257_123, 154_898_028, 141_180_587],
    ],
    [
        [162_974_812_119, 159_290_061_987, 88_046_641_169],
        [92_223_151_661, 91_667_904_406, 44_068_454_971],
        [369_516_432_430, 369_361_799_063, 365_290_380_661],
        [70_795_673_950, 70_743_136_124, 69_803_996_038],
        [181_708_327, 165_767_821, 150_109_797],
    ],
    [
        [185_000_017_027, 182_334_345_473, 99_980_147_041],
        [105_753_516_186, 107_937_830_322, 51_404_177_181],
        [418_153_161_055, 418_308_565_828, 413_653_475_581],
        [80_035_882_398, 80_063_204_510, 79_024_105_589],
        [199_764_528, 177_936_926, 160_525_449],
    ],
    [
        [210_941_799_094, 204_714_679_254, 114_251_113_756],
        [122_640_849_067, 122_188_553_256, 58_360_041_127],
        [468_151_025_415, 467_354_869_323, 462_665_165_216],
        [89_657_067_510, 89_411_550_407, 88_360_523_943],
        [218_292_301, 191_701_247, 178_535_678],
    ],
    [
        [233_595_958_008, 227_540_615_689, 160_341_979_938],
        [136_153_676_021, 133_635_240_742, 65_909_135_465],
        [517_001_168_497, 516_210_976_158, 511_374_038_613],
        [98_911_641_329, 98_700_069_712, 97_646_761_028],
        [232_341_823, 199_256_308, 183_135_268],
    ],
];

/// The seconds that perf stat reported by number of jobs, 1 first, all six patterns together: 4
/// streams, 8 streams, per-cpu.
#[rustfmt::skip]
const ELAPSED_S: [[f64; DESIGNS]; JOBS] = [
    [20.909073870, 20.875670495, 20.817838540],
    [18.529488399, 18.720566469, 16.356103108],
    [18.991159531, 18.991340812, 16.766216066],
    [19.560643828, 19.551323547, 16.246621715],
    [24.746498464, 25.221646740, 20.696112444],
    [28.258181828, 28.289765505, 22.885688857],
    [32.632490241, 31.909125381, 26.272753738],
    [35.651403851, 36.027596308, 29.108024711],
    [40.569362365, 40.024227989, 32.898204012],
    [44.673112304, 43.874898137, 35.632952191],
];

/// Returns the rates of one design with a pattern: `read_mb_per_s` and `write_mb_per_s`, as far as it reads
/// and writes, and their sum `mb_per_s`.
fn rates(pattern: Pattern, jobs: usize, design: usize) -> Option<BTreeMap<&'static str, f64>> {
    let (read, write) = match pattern {
        Pattern::Read => (Some(0), None),
        Pattern::RandRead => (Some(1), None),
        Pattern::Write => (None, Some(2)),
        Pattern::RandWrite => (None, Some(3)),
        Pattern::Rw => (Some(4), Some(5)),
        Pattern::RandRw => (Some(6), Some(7)),
    };
    let lines = RATES_MB_PER_S.get(jobs.checked_sub(1)?)?;
    let rate = |line: usize| lines[line][design] * MB;
    let (read, write) = (read.map(rate), write.map(rate));
    let sum = read.unwrap_or(0.0) + write.unwrap_or(0.0);
    let parts = [("read_mb_per_s", read), ("write_mb_per_s", write), ("mb_per_s", Some(sum))];
    Some(parts.into_iter().filter_map(|(name, rate)| rate.map(|rate| (name, rate))).collect())
}

/// Returns the patch's gain over the design `before` (0 for 4 streams, 1 for 8) with a pattern.
pub(super) fn of_pattern(pattern: Pattern, jobs: usize, before: usize) -> Option<Published> {
    let side = |design: usize| {
        let values = rates(pattern, jobs, design)?;
        let figure = format!("{:.0} MB/s", values["mb_per_s"]);
        Some(PublishedSide { design: DESIGN_NAMES[design], figure, values })
    };
    let (before, after) = (side(before)?, side(PER_CPU)?);
    let ratio = after.values["mb_per_s"] / before.values["mb_per_s"];
    Some(Published { before, after, ratio })
}

/// Returns the same for all six patterns together: seconds, and perf's counts.
pub(super) fn of_all(jobs: usize, before: usize) -> Option<Published> {
    let row = jobs.checked_sub(1).filter(|row| *row < JOBS)?;
    let side = |design: usize| {
        let elapsed_s = ELAPSED_S[row][design];
        let counts = COUNTERS.iter().zip(&COUNTS[row]).map(|(name, counts)| (*name, counts[design] as f64));
        let values = counts.chain([("elapsed_s", elapsed_s)]).collect();
        PublishedSide { design: DESIGN_NAMES[design], figure: format!("{elapsed_s:.1} s"), values }
    };
    let ratio = ELAPSED_S[row][before] / ELAPSED_S[row][PER_CPU];
    Some(Published { before: side(before), after: side(PER_CPU), ratio })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn figures_of_the_message_are_found() {
        let randwrite = of_pattern(Pattern::RandWrite, 4, 0).unwrap();
        assert_eq!((randwrite.before.design, randwrite.after.design), ("4 streams", "per-cpu"));
        assert!((randwrite.ratio - 5785.4 / 3608.9).abs() < 1e-9);
        assert!((randwrite.before.values["write_mb_per_s"] - 3608.9 * 1.048576).abs() < 1e-6);
        assert!(!randwrite.before.values.contains_key("read_mb_per_s"));
        let randrw = of_pattern(Pattern::RandRw, 1, 1).unwrap();
        assert!((randrw.before.values["mb_per_s"] - (405139.0 + 405197.0) * 1024.0 / 1e6).abs() < 1e-6);
        assert!((randrw.after.values["read_mb_per_s"] - 403373.0 * 1024.0 / 1e6).abs() < 1e-6);
        let all = of_all(10, 1).unwrap();
        assert_eq!(all.before.values["elapsed_s"], 43.874898137);
        assert_eq!(all.after.values["branch_misses"], 183_135_268.0);
        assert!(of_all(11, 0).is_none() && of_pattern(Pattern::Read, 0, 0).is_none());
    }

    /// The message's units change from KB/s to MB/s within columns; a mistake would stand out.
    #[test]
    fn no_figure_is_out_of_line() {
        for pattern in Pattern::ALL {
            for jobs in 1..=JOBS {
                for before in 0..PER_CPU {
                    let gain = of_pattern(pattern, jobs, before).unwrap().ratio;
                    assert!((0.95..1.85).contains(&gain), "{pattern}, {jobs} jobs: {gain}");
                    let gain = of_all(jobs, before).unwrap().ratio;
                    assert!((1.0..1.3).contains(&gain), "{jobs} jobs: {gain}");
                }
            }
        }
    }
}
