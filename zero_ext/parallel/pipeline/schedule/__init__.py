"""How a pipeline runs: schedules, their runners, timelines and replays."""
