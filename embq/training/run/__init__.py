"""Run folder, journal, scratch folder and progress that trainings have in common."""
