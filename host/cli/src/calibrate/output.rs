//! The results of a calibration: the residuals and the table, or how far `auto` is from the best.

use super::{CalibrateArgs, Cell, MeasuredJob};
use crate::exit::Failure;
use crate::options::Algo;
use anyhow::{Context, anyhow};
use std::io::{self, Write};
use std::path::Path;
use sumac::select::{CostTable, Fitted, JobFacts, Sample, fit, predict};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// Fit and write the table, or print how `auto` did.
pub(super) fn finish(args: &CalibrateArgs, jobs: &[MeasuredJob], checked: Option<&CostTable>) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    if let Some(table) = checked {
        return print_check(&mut out, jobs, table);
    }
    let samples: Vec<Sample> = cells(jobs).map(|cell| cell.sample.clone()).collect();
    let now = OffsetDateTime::now_utc().replace_nanosecond(0).unwrap_or(OffsetDateTime::UNIX_EPOCH);
    let date = now.format(&Rfc3339).map_err(Failure::run)?;
    let fitted = fit(&samples, &CostTable::data_sheets(), &date).map_err(Failure::run)?;
    match &args.output {
        None => write!(out, "{}", fitted.table.to_toml())?,
        Some(path) => {
            print_residuals(&mut out, jobs, &fitted)?;
            write_table(path, &fitted.table.to_toml()).map_err(Failure::Run)?;
            writeln!(out, "{}: {}", path.display(), fitted.table.origin)?;
        }
    }
    Ok(())
}

fn cells(jobs: &[MeasuredJob]) -> impl Iterator<Item = &Cell> {
    jobs.iter().flat_map(|job| job.cells.iter().flatten())
}

/// Write the file as a whole or not at all.
fn write_table(path: &Path, text: &str) -> anyhow::Result<()> {
    let folder = path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
    let write = || -> anyhow::Result<()> {
        let mut file = tempfile::Builder::new().prefix(".sumac-").tempfile_in(folder)?;
        file.write_all(text.as_bytes())?;
        file.as_file().sync_all()?;
        file.persist(path)?;
        Ok(())
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}

fn describe(facts: &JobFacts) -> String {
    let tree = match &facts.tree {
        None => "no tree".to_owned(),
        Some(tree) => format!("{} levels, {}", tree.levels, tree.transport(facts.ranks).name()),
    };
    format!("{} ranks, {} on a host, {tree}", facts.ranks, facts.ranks_per_host)
}

/// Print measured and modelled times.
fn print_residuals(out: &mut impl Write, jobs: &[MeasuredJob], fitted: &Fitted) -> io::Result<()> {
    let mut modelled = fitted.modelled_s.iter();
    for job in jobs {
        writeln!(out, "{}: measured us (model's error)", describe(&job.facts))?;
        for row in &job.cells {
            let Some(first) = row.first() else { continue };
            write!(out, "{:>10} B", first.case.size_bytes())?;
            for Cell { case, sample } in row {
                let error = modelled.next().map_or(0.0, |modelled| modelled / sample.seconds - 1.0);
                write!(out, "  {} {:.1} ({:+.0} %)", case.algo, sample.seconds * 1e6, error * 100.0)?;
            }
            writeln!(out)?;
        }
    }
    Ok(())
}

/// The verdict on the choices of a table.
#[derive(Debug, Default)]
struct Verdict {
    /// The time of `auto` over that of the best, by cell.
    lost: Vec<f64>,
    /// Relative errors of predictions, by cell and algorithm.
    errors: Vec<f64>,
}

/// Print by how much `auto` misses the best. `auto` counts with the time of the path that it took, which was measured
/// in the same turns.
fn print_check(out: &mut impl Write, jobs: &[MeasuredJob], table: &CostTable) -> Result<(), Failure> {
    let mut verdict = Verdict::default();
    for job in jobs {
        writeln!(out, "{}", describe(&job.facts))?;
        writeln!(out, "{:>12}  {:<14} {:>10}  {:<14} {:>10}  {:>6}", "bytes", "auto", "us", "best", "us", "lost")?;
        for row in &job.cells {
            for cell in row.iter().filter(|cell| cell.case.algo != Algo::Auto) {
                let predicted =
                    predict(table, &job.facts, &cell.sample.desc, cell.sample.path).map_err(Failure::run)?;
                verdict.errors.push((predicted / cell.sample.seconds - 1.0).abs());
            }
            let auto = row.iter().find(|cell| cell.case.algo == Algo::Auto);
            let forced = || row.iter().filter(|cell| cell.case.algo != Algo::Auto);
            let Some(auto) = auto else { continue };
            let taken = forced().find(|cell| cell.sample.path == auto.sample.path).unwrap_or(auto);
            let best = forced().min_by(|a, b| a.sample.seconds.total_cmp(&b.sample.seconds)).unwrap_or(auto);
            let lost = taken.sample.seconds / best.sample.seconds;
            verdict.lost.push(lost);
            let us = |cell: &Cell| cell.sample.seconds * 1e6;
            writeln!(
                out,
                "{:>12}  {:<14} {:>10.1}  {:<14} {:>10.1}  {lost:>6.2}",
                auto.case.size_bytes(),
                taken.sample.path.name(),
                us(taken),
                best.sample.path.name(),
                us(best),
            )?;
        }
    }
    verdict.print(out)?;
    if verdict.lost.is_empty() { Err(Failure::Run(anyhow!("nothing was measured"))) } else { Ok(()) }
}

impl Verdict {
    fn print(&self, out: &mut impl Write) -> io::Result<()> {
        let within = self.lost.iter().filter(|lost| **lost <= 1.15).count();
        let worst = self.lost.iter().copied().fold(1.0, f64::max);
        writeln!(out, "auto within 1.15 of the best: {within} of {} cells; worst {worst:.2}", self.lost.len())?;
        let mut errors = self.errors.clone();
        errors.sort_by(f64::total_cmp);
        let median = errors.get(errors.len() / 2).copied().unwrap_or(0.0);
        writeln!(out, "median error of {} predictions: {:.0} %", errors.len(), median * 100.0)
    }
}
