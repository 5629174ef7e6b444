//! Faults on purpose, to see what a run does then: the environment variable `AUTODIDACT_FAULT`, for tests.
//!
//! | value | what happens |
//! |---|---|
//! | `kill@P:N` | process `P` kills itself in front of its operation `N` |
//! | `stop@P:N` | it stops answering there, as by SIGSTOP |
//! | `extra@P:N` | it does an operation there that the others do not |
//! | `nan@R:N` | a pixel that rank `R` sees in step `N`, from 1, is not a number |
//! | `inf@R:N` | in the first attempt at step `N`, from 1, a gradient of rank `R` is infinite |
//! | `slow@R:N` | rank `R` takes `N` milliseconds longer for each step |

/// What goes wrong, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    kind: Kind,
    /// Process or rank.
    whose: usize,
    number: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Kill,
    Stop,
    Extra,
    Nan,
    Inf,
    Slow,
}

impl Fault {
    /// Reads the environment.
    ///
    /// # Errors
    /// With the value of the variable, if that is no fault.
    pub fn from_env() -> Result<Option<Self>, String> {
        match std::env::var("AUTODIDACT_FAULT") {
            Ok(text) => Self::read(&text).map(Some).ok_or(text),
            Err(_) => Ok(None),
        }
    }

    fn read(text: &str) -> Option<Self> {
        let (kind, place) = text.split_once('@')?;
        let (whose, number) = place.split_once(':')?;
        let kind = match kind {
            "kill" => Kind::Kill,
            "stop" => Kind::Stop,
            "extra" => Kind::Extra,
            "nan" => Kind::Nan,
            "inf" => Kind::Inf,
            "slow" => Kind::Slow,
            _ => return None,
        };
        Some(Self { kind, whose: whose.parse().ok()?, number: number.parse().ok()? })
    }

    /// Tells whether a pixel of `rank` is spoilt in `step`, counted from 1.
    #[must_use]
    pub fn spoils(self, rank: usize, step: u64) -> bool {
        self == Self { kind: Kind::Nan, whose: rank, number: step }
    }

    /// Tells whether a gradient of `rank` overflows in `step`, counted from 1.
    #[must_use]
    pub fn overflows(self, rank: usize, step: u64) -> bool {
        self == Self { kind: Kind::Inf, whose: rank, number: step }
    }

    /// How much longer a step of `rank` takes.
    #[must_use]
    pub fn delay(self, rank: usize) -> std::time::Duration {
        let slow = self.kind == Kind::Slow && self.whose == rank;
        std::time::Duration::from_millis(if slow { self.number } else { 0 })
    }

    /// Kills or stops `process` in front of an operation; tells whether it is to do one too many.
    pub(super) fn strike(self, process: usize, operation: u64) -> bool {
        if (self.whose, self.number) != (process, operation) {
            return false;
        }
        let signal = match self.kind {
            Kind::Kill => "-KILL",
            Kind::Stop => "-STOP",
            Kind::Extra => return true,
            Kind::Nan | Kind::Inf | Kind::Slow => return false,
        };
        let own = std::process::id().to_string();
        let _ = std::process::Command::new("kill").args([signal, &own]).status();
        false
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = format!("{:?}", self.kind).to_lowercase();
        write!(f, "{kind}@{}:{}", self.whose, self.number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_read_and_strike_once() {
        let extra = Fault::read("extra@1:37").unwrap();
        assert!(extra.strike(1, 37) && !extra.strike(0, 37) && !extra.strike(1, 36));
        let nan = Fault::read("nan@2:3").unwrap();
        assert!(nan.spoils(2, 3) && !nan.spoils(2, 4) && !nan.strike(2, 3));
        let inf = Fault::read("inf@2:3").unwrap();
        assert!(inf.overflows(2, 3) && !inf.overflows(1, 3) && !inf.spoils(2, 3) && !nan.overflows(2, 3));
        let slow = Fault::read("slow@1:250").unwrap();
        assert_eq!([0, 1].map(|rank| slow.delay(rank).as_millis()), [0, 250]);
        assert_eq!(slow.to_string(), "slow@1:250");
        for text in ["", "kill", "kill@1", "kill@x:1", "burn@1:2"] {
            assert_eq!(Fault::read(text), None);
        }
    }
}
