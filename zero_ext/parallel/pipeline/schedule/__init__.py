"""Running a pipeline: schedules, their runners, timelines and replays."""
