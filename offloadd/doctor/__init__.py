"""What is right and wrong with a machine for offloadd: checks that read `/proc`, `/sys` and the configured volumes, and never change anything."""

from offloadd.doctor.diagnosis import Diagnosis, diagnose
from offloadd.doctor.finding import Finding, Level

__all__ = ["Diagnosis", "Finding", "Level", "diagnose"]
